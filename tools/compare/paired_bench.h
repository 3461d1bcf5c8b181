// Two builds of the library, timed in turns (pairs of A and B, who is first is drawn) in one process, from the same
// input bytes into the same output memory, which is filled with NaN before every timed run and compared after it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/bench_runner.h"
#include "tools/compare/loaded_library.h"
#include "tools/compare/paired_stats.h"

namespace fla::tools {

struct PairedRow {
  std::string op, mode, shape;
  NamedShape sizes;
  std::string backend_base, backend_new;
  std::string error;               // why there is no measurement, or why it does not count; empty: sound
  std::vector<std::string> flags;  // that block the verdict
  Paired stats;
  std::vector<Sample> base, candidate;  // in the order of measurement
  double taken_off = 0;                 // share of the samples' time that was waiting and does not count
  std::size_t peak_base = 0, peak_new = 0;
  double err_base = 0, err_new = 0;  // the largest R against the reference in double
  std::string err_on;                // what was compared for it: "B1_T4096_H16_D64, one head"
  double flops = 0, bytes = 0, floor = 0;

  bool blocked() const;
};

struct PairedRun {
  Machine machine, after;
  std::vector<double> mhz;                 // samples taken between rounds
  double load_before = 0, load_after = 0;  // runnable processes, one-minute mean
  Roof roof;
  int threads = 0;
  std::string dtype, device = "cpu";
  gpu::DeviceText gpu;  // where the device is one
  GpuClocks clocks;
  std::vector<PairedRow> rows;

  bool blocked() const;
  std::vector<Paired> paired_rows() const;  // of the sound ones
  Verdict verdict() const { return verdict_of(paired_rows(), blocked()); }
};

PairedRun run_paired(const std::vector<const Registry::Entry*>& ops, const BenchOptions& o,
                     const std::shared_ptr<LoadedLibrary>& base, const std::shared_ptr<LoadedLibrary>& candidate,
                     bool same_flags);

Json machine_json(const PairedRun& r);
Json rows_json(const PairedRun& r);
// Whether a flag of such a row blocks the verdict; others tell something.
bool blocks(const std::string& flag);
// The verdict that these rows, from rows_json, carry beside a green gate of the same build. For the loop, which has that
// gate from another run and asks for the times alone.
Verdict verdict_of_rows(const Json& rows);
void print_paired(const PairedRun& r);

}  // namespace fla::tools
