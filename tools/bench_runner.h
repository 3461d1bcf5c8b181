// Times operators: every (operator, shape, mode) row is warmed up, then all rows are measured in turns until each has
// enough repetitions, so that drift of the machine spreads over all of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/command.h"
#include "tools/common/cases.h"
#include "tools/common/machine.h"
#include "tools/common/shape_text.h"
#include "tools/gpu/device.h"
#include "tools/gpu/watch.h"

namespace fla::tools {

struct BenchOptions {
  std::string shapes;         // names or groups, separated by commas; empty: the CPU set
  std::string custom_shapes;  // JSON, or @FILE
  std::string modes;          // "fwd,fwdbwd"; empty: both where the operator has a backward
  std::string varlen;         // "even", "ragged" or boundaries
  CallOptions call;
  bool once = false;  // on a GPU: each row is called once, for a profiler that watches, and has no time
};
void add_bench_options(CLI::App* app, BenchOptions& o);

struct BenchRow {
  std::string op, mode, shape;
  NamedShape sizes;
  std::string backend, kernel;
  std::string error;     // why there is no measurement, or why it does not count; empty: sound
  bool checked = false;  // outputs finite after timing, and a small case agrees with the reference
  double err = 0.0;      // the largest R of that small case
  double median = 0, p10 = 0, p20 = 0, p80 = 0, p90 = 0;  // ms
  std::size_t n = 0;
  std::size_t peak_bytes = 0;  // inputs, outputs, workspace
  std::size_t workspace_bytes = 0;
  double flops = 0.0, bytes = 0.0;  // useful operations (0: no model), tensors read and written once
  double floor = 0.0;               // ms; 0: no model
  double host_us = 0.0;             // on a GPU: median time that a call keeps the CPU

  bool ok() const { return error.empty() && checked; }
};

struct BenchRun {
  Machine machine, after;
  Roof roof;
  int threads = 0;
  std::string dtype, device = "cpu";
  gpu::DeviceText gpu;  // where the device is one
  GpuClocks clocks;
  std::vector<BenchRow> rows;

  int exit_code() const;
};
// Refuses bad options, so that nothing slow is started for them.
void validate(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o);
BenchRun run_bench(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o);

inline constexpr std::uint64_t kBenchSeed = 42;

// Of the range that a call is in on a profiler's time line: no character that its filters give a meaning.
std::string range_name(const std::string& op, const std::string& mode, const std::string& shape);

Json machine_json(const BenchRun& b);
Json to_json(const BenchRun& b);
void print_bench(const BenchRun& b);

// ---- what a comparison of two builds shares with it

// The benchmark's call: only what the shape is about. Decoding takes a state and gives one.
Case bench_case(const FunctionSpec& spec, const Sizes& sizes, DType dtype, std::uint64_t seed = kBenchSeed);
// The same call in small.
Sizes cut_down(Sizes s);
// The contract's limits on R: 1e-4 in F32; in 16 bits the page's tolerance, in BF16 with room for its rounding.
double limit_of(const FunctionSpec& spec, const std::string& tensor, DType dtype);
bool all_finite(const TensorView& t);  // t is contiguous
std::size_t bytes_of(const TensorView& t);
double flops_of(const DynamicCall& call, const Sizes& sizes);  // 0: no model
// What a shape's tensors will take, before any of them exists; the largest one is generated in double first.
double estimate_bytes(const FunctionSpec& spec, const Sizes& s, DType dtype, bool backward);
std::vector<std::string> parse_modes(const std::string& text);
// Packed shapes are not for functions of dense batches alone. Asked for by hand, that is a mistake; among other
// operators, no row.
bool skips(const FunctionSpec& spec, const NamedShape& s, std::size_t operators);

}  // namespace fla::tools
