// What the gate's tests share: registering one test per public function from the registry, so that a new family gets
// all of them without a line here, contexts per backend, and the comparison of a backend with the reference.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fla/core/context.h"
#include "fla/registry/registry.h"
#include "tools/common/buffer.h"
#include "tools/common/cases.h"
#include "tools/common/compare.h"

namespace fla::gate {

using tools::Buffer;
using tools::Case;
using tools::CaseOptions;
using tools::GateRegime;
using tools::Layout;
using tools::make_case;
using tools::Outcome;
using tools::RunOptions;
using tools::Sizes;

using FunctionTest = void (*)(const Registry::Entry&);

// Registers `Family.function/Topic` for every public function, where `applies` says so (empty: everywhere).
bool for_every_function(const char* topic, FunctionTest test, bool (*applies)(const FunctionSpec&) = nullptr);
// The same for tests that judge backends one by one: they judge a plug-in too.
bool for_every_backend(const char* topic, FunctionTest test, bool (*applies)(const FunctionSpec&) = nullptr);
// For a plug-in alone: the built-in backends' cases may be too few of those that it takes.
bool for_every_plugin(const char* topic, FunctionTest test);
void register_function_tests();  // called by main
// From now on only these are judged, one by one, and only tests that judge backends are registered: the backend of a
// plug-in, or all of a device. They may refuse calls, which are counted. A plug-in's test in which it takes none is
// skipped. What a device's backends refuse is recorded (records.h): more than that is a failure, and so is a test in
// which nothing is taken. Tests of a backend that is not called like the device have its name behind theirs.
void judge_plugin(const std::string& backend);
void judge_device(DeviceType device);
bool judges_device();
bool judges_one_by_one();                         // a plug-in, or a device's backends
std::string camel(const std::string& operation);  // "simple_gla" -> "SimpleGla"

// Strict contexts with poisoned workspaces, made once per (backend, threads).
const Context& context(const std::string& backend, int threads = 2);
inline const Context& reference() { return context(kReference); }
// While it lives, this thread's contexts of backends let only this kernel serve calls.
class OnlyKernel {
 public:
  explicit OnlyKernel(std::string name);
  ~OnlyKernel();
  OnlyKernel(const OnlyKernel&) = delete;
  OnlyKernel& operator=(const OnlyKernel&) = delete;
};
// The CPU backends that serve a function, without the reference; or the one that the running test judges. Not empty: a function
// without one fails its tests.
std::vector<std::string> backends(const Registry::Entry& e);

Sizes sizes(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t K, std::int64_t V);
Sizes packed(std::vector<std::int64_t> cu_seqlens, std::int64_t H, std::int64_t K, std::int64_t V,
             DType index = DType::I64);
bool allows(const FunctionSpec& spec, const Sizes& s);  // widths within what the function takes
std::int64_t at_most(const FunctionSpec& spec, const std::string& symbol, std::int64_t n);  // n, or its largest width
std::vector<bool> passes(const FunctionSpec& spec);  // whether backward: false, and true where there is a gradient
Outcome run_pass(const Case& c, const Context& ctx, bool backward, const RunOptions& o = {});
std::vector<std::string> gates(const Case& c);     // inputs that are log gates
std::string first_wide(const FunctionSpec& spec);  // "q" or "x"; of a list its first
bool takes(const FunctionSpec& spec, std::string_view input);
// Whether every call can hand its final state to the next one as its initial state.
bool has_state(const FunctionSpec& spec);
bool takes_dim(const FunctionSpec& spec, std::string_view symbol);
// The case with whatever has to come with this input or flag ("A_log" with use_gate_in_kernel).
Case completed(const Case& c, std::string_view name);
Case with_input(const Case& c, const std::string& name);  // generated, completed
Case with_states(const Case& c);                          // every input that an output of the same name continues
// Values of a flag that is a number, of either sign and zero where that is legal.
std::vector<double> legal_numbers(const FlagSpec& f);
// The case with a chunk_size as near to n as the function has one.
Case chunked(const Case& c, std::int64_t n);

// The limits of a tensor of this call: F32 1e-4; 16 bits the function's page, as contract/README.md has it.
tools::Limits limits(const Case& c, const std::string& tensor);

// Runs the case on a backend, forward and backward, and on the reference from the same values widened to F32, and
// compares everything that came out, whole and by blocks. One failure per tensor.
void expect_agrees(const Case& c, const std::string& backend, const RunOptions& o = {}, bool backward = true);
// What there is to say against it, one text per tensor; empty: it agrees, or the backend that is judged refused it.
std::vector<std::string> disagreements(const Case& c, const std::string& backend, const RunOptions& o = {},
                                       bool backward = true);
// The same for calls that nobody has looked at, in which a result may be a small difference of large numbers: a tensor
// also agrees where it is as near as the reference's own results for inputs half a unit in the last place beside these,
// times kNeighbours.
inline constexpr double kNeighbours = 4.0;
std::vector<std::string> disagreements_beyond_rounding(const Case& c, const std::string& backend,
                                                       const RunOptions& o = {});
// The same of one pass, with what the backend gave.
std::vector<std::string> disagreements_of_pass(const Case& c, const std::string& backend, bool backward,
                                               const RunOptions& o, Outcome& got);
// Agrees with the reference, forward and backward, and nothing of it is infinite or NaN.
void expect_finite(const Case& c, const std::string& backend);
void expect_close(const Outcome& expected, const Outcome& got, double R, const std::string& what);
void expect_same_bits(const Outcome& expected, const Outcome& got, const std::string& what);
void expect_ok(const Outcome& o, const std::string& what);
// R of two ways to compute the same in F32.
inline constexpr double kClose = 2e-5;
// Keeps of both what both have, under one name for g and gk, and for the states after the call.
void common(Outcome& a, Outcome& b);
// Two families' calls that compute the same, forward and backward, but for the tensors in `ignore`: name and why.
void expect_equal_families(const Case& a, const Case& b, const std::map<std::string, std::string>& ignore = {});
// [B, T, H] as [B, T, H, K]: each key channel has the head's gate.
Buffer per_channel(const TensorView& g, std::int64_t K);
// Whether the one backend that is judged refused the call; never true of the CPU's own ones.
bool refused(const Status& s);
inline bool refused(const Outcome& o) { return refused(o.status); }
// Counts a call that no expect_ function has seen. True where the judged backend did not take it, and nothing is to
// judge.
bool count_call(bool taken);

// The largest R and block R that expect_agrees has seen, by backend and type: printed at the end of a run.
void print_worst();
// Names the device's backends of which no refusals are recorded: nothing holds them to any.
void print_unrecorded();

}  // namespace fla::gate
