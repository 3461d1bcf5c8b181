// Case: one call of a public function, made from its OpSpec: seeded inputs, flags, gate regime. The same seed gives the
// same bytes on every machine. Used by the gate, the benchmark and the program.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fla/core/context.h"
#include "fla/registry/dynamic.h"
#include "tools/common/buffer.h"

namespace fla::tools {

struct Sizes {
  std::int64_t B = 1, T = 64, H = 2, K = 32, V = 32, D = 32;
  std::int64_t HV = 0;                   // value heads; 0: as many as H
  std::int64_t HQ = 0;                   // query heads; 0: as many as H
  std::int64_t M = 0;                    // memory slots; 0: as many as V
  std::int64_t L = 0;                    // levels; 0: those that T tokens need. Or tensors of a list; 0: three
  std::int64_t P = 0;                    // slots of a pool of states; 0: one for each sequence
  std::int64_t TQ = 0;                   // queries, the last ones of T tokens; 0: as many as T
  std::vector<std::int64_t> cu_seqlens;  // given: packed, B is 1 and T its last entry
  DType index = DType::I64;              // of cu_seqlens
};

// With those that were not given and that no other size tells, where the function has them.
Sizes completed(Sizes s, const FunctionSpec& spec);

// The size of one axis symbol ("B", "N", "HV"); -1 for one that sizes do not tell.
std::int64_t size_of_symbol(const Sizes& s, std::string_view symbol);
// The same for an axis of a call: also products, and sizes that the call's flags or boundaries tell.
std::int64_t axis_size(const Sizes& s, const FunctionSpec& spec, const void* args, std::string_view symbol);

// What the log gates look like, from no decay to far beyond what exp can hold in one chunk.
enum class GateRegime : std::uint8_t {
  Plain,           // the OpSpec's generator
  Zero,            // 0
  Mild,            // -0.01
  Strong,          // -5
  Minus40,         // -40
  Minus316,        // -316
  Extreme,         // a random half -1000, the others 0 or -0.3
  ExtremeChannel,  // plain, but the first channel (or head) -1000
};
const char* name_of(GateRegime r);
inline constexpr GateRegime kGateRegimes[] = {GateRegime::Plain,   GateRegime::Zero,          GateRegime::Mild,
                                              GateRegime::Strong,  GateRegime::Minus40,       GateRegime::Minus316,
                                              GateRegime::Extreme, GateRegime::ExtremeChannel};

struct CaseOptions {
  DType dtype = DType::F32;  // of the wide inputs; gates and states are F32, in an F64 case F64
  std::uint64_t seed = 42;
  GateRegime regime = GateRegime::Plain;
  bool bf16_exact = false;  // every float input is representable in BF16
};

struct RunOptions {
  Layout outputs;                    // of every output
  std::size_t workspace_offset = 0;  // bytes past a 64-byte boundary
  std::vector<std::string> only;     // these outputs alone ("out.o"); empty: all
  bool state_in_place = false;       // out.final_state, or the pool, is written into the input's own memory
  std::optional<Device> device{};    // empty: where the one backend that the context allows computes
};

// What one run produced, by the names of recorded cases: "out.o", "out.final_state", "grad.q".
struct Outcome {
  Status status;
  bool no_such_pass = false;  // the function has no backward: nothing ran
  std::string backend, kernel;
  std::size_t workspace_bytes = 0;
  std::map<std::string, Buffer, std::less<>> tensors;
  // Memory that was touched though nothing had the right to: "out.o: written outside the tensor", "q: input changed",
  // "workspace: written outside". Empty after a sound run.
  std::vector<std::string> faults;

  bool ok() const { return status.ok() && faults.empty(); }
  std::string problem() const;  // status and faults as text; empty when ok
  bool has(std::string_view name) const { return tensors.contains(name); }
  const TensorView& operator[](std::string_view name) const;
};

// Values, not a handle: the editing members return a changed copy, which shares the untouched inputs' memory.
class Case {
 public:
  Case() = default;
  // Required inputs, and optional ones that the OpSpec has a generator for. Others come with with(). A function that
  // takes packed sequences alone gets the B sequences of T tokens packed.
  static Result<Case> make(const Registry& registry, std::string_view function, const Sizes& sizes,
                           const CaseOptions& options = {});

  const FunctionSpec& spec() const { return *spec_; }
  const Sizes& sizes() const { return sizes_; }
  const CaseOptions& options() const { return options_; }
  std::string text() const;  // for messages: function, sizes, type, regime, flags

  // How many rows of an axis one unit of `symbol` takes: 1 for that symbol itself, R of T in "T*R", HV / H of H in
  // "HV", as in "HQ", 1 of T in "TQ"; 0 for an axis without it.
  std::int64_t rows_of(const ArgSpec& a, std::size_t axis, std::string_view symbol) const;
  bool takes(std::string_view argument) const;  // an input of this function
  bool has(std::string_view input) const { return inputs_.contains(input); }
  bool has_flag(std::string_view flag) const { return spec_->find_flag(flag) != nullptr; }
  const TensorView& input(std::string_view name) const { return inputs_.at(std::string(name)).view; }
  std::vector<std::string> input_names() const;
  // As set by flag(), the OpSpec's choices for tools included.
  const std::map<std::string, FlagValue, std::less<>>& flags() const { return flags_; }
  std::vector<std::string> upstream_names() const;  // of prepared(), by output

  // The tensors of a list are inputs of their own: "residuals.0". with() and without() take the list's name as well.
  // The members below throw std::invalid_argument when the function has no such argument or flag.
  Case with(std::string_view input) const;  // generated by its OpSpec, or as a gate, state or key sum by its name
  Case with(std::string_view input, const TensorView& contents) const;  // a copy of these values and type
  Case with_view(std::string_view input, const TensorView& view, std::shared_ptr<const void> owner = {}) const;
  Case without(std::string_view input) const;
  Case fill(std::string_view input, double x) const;
  Case cast(std::string_view input, DType t) const;
  Case layout(std::string_view input, const Layout& l) const;
  Case expand(std::string_view input, int axis) const;  // index 0 of the axis everywhere, by stride 0
  Case flag(std::string_view name, FlagValue v) const;
  Case without_flag(std::string_view name) const;
  // The same inputs and flags under another function's name; `rename` maps argument names ("g" -> "gk").
  Case as(std::string_view function, const std::map<std::string, std::string>& rename = {}) const;
  Case widen(DType to) const;  // every float input in type `to`, same values: what the reference computes from
  // Tokens [begin, end) of a dense case: every input whose axes have T, sharing memory.
  Case tokens(std::int64_t begin, std::int64_t end) const;
  Case head(std::int64_t h) const;  // one head alone
  // Sequence n of a packed case (or batch row n of a dense one) as a dense case of its own.
  Case sequence(std::int64_t n) const;

  // Upstream gradients are seeded too; these replace them, by output ("o", "final_state").
  Case with_upstream(std::string_view output, const TensorView& contents) const;
  Case without_upstream(std::string_view output) const;

  // Every output the function can give in this call: asks for each output flag unless the case has set it.
  // All outputs and the workspace are poisoned and guarded.
  Outcome run(const Context& ctx, const RunOptions& o = {}) const;
  // Gradients of all differentiable inputs, from a seeded upstream gradient for every differentiable output. Of a
  // function without a backward nothing, and no_such_pass says so.
  Outcome run_backward(const Context& ctx, const RunOptions& o = {}) const;

  // The call with inputs and flags set, outputs not bound; for explain and for tests of refusals.
  Result<DynamicCall> call() const;
  // With the upstream gradients that prepared() or with_upstream() put into the case, which must outlive the call.
  Result<DynamicCall> backward_call() const;
  Case prepared() const;  // holds its seeded upstream gradients
  const TensorView& upstream(std::string_view output) const { return upstream_.at(std::string(output)).view; }

 private:
  struct Tensor {
    TensorView view;
    std::shared_ptr<const void> owner;
    std::shared_ptr<const Buffer> buffer;  // where the memory is one of ours
  };
  const ArgSpec* require(std::string_view input) const;
  std::vector<std::string> names_of(const ArgSpec& a) const;
  Tensor generate(const ArgSpec& a, const std::string& stream) const;
  Shape shape_of(const ArgSpec& a, const FunctionSpec& spec) const;
  DType type_of(const ArgSpec& a) const;
  std::map<std::string, Tensor, std::less<>> upstreams() const;
  bool wants_output(const FlagSpec& f) const;
  Case select(const std::map<std::string, std::pair<std::int64_t, std::int64_t>>& ranges) const;
  Outcome execute(const Context& ctx, DynamicCall& call, const RunOptions& o) const;

  const Registry* registry_ = nullptr;
  const FunctionSpec* spec_ = nullptr;
  Sizes sizes_;
  CaseOptions options_;
  std::map<std::string, Tensor, std::less<>> inputs_;
  std::map<std::string, Tensor, std::less<>> upstream_;  // given ones, by output
  std::vector<std::string> no_upstream_;
  std::map<std::string, FlagValue, std::less<>> flags_;
};

// make() for tests: T and K are cut to what the function takes; throws std::invalid_argument.
Case make_case(std::string_view function, const Sizes& sizes, const CaseOptions& options = {});

// x[i] of a stream: standard normal from twelve uniforms, in integer arithmetic, so equal on every machine.
double normal(std::uint64_t stream, std::uint64_t i);
double uniform(std::uint64_t stream, std::uint64_t i);  // [0, 1), a multiple of 2^-53
double log_sigmoid(double x);                           // to 1e-12, and the same bits on every machine
std::uint64_t stream_of(std::uint64_t seed, std::string_view name);

}  // namespace fla::tools
