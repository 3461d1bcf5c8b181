// Calls by name, on named tensors: what the program, the gate, the C ABI and bindings use. The typed functions and this
// end in the same run_call.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fla/registry/registry.h"

namespace fla {

// Names are those of recorded cases. Inputs: argument names ("q", "initial_state", "initial_state.1"); the tensors of a
// list one by one ("residuals.0", or "residuals[0]"). A backward's upstream gradients: "grad_out.o". What comes out:
// "out.o", "out.final_state.0", "grad.q", "grad.residuals.0".
class FLA_API DynamicCall {
 public:
  // Unknown names get the nearest known ones.
  static Result<DynamicCall> make(const Registry& registry, std::string_view function);

  const FunctionSpec& spec() const { return entry_->spec; }
  const Registry::Entry& entry() const { return *entry_; }

  Status set(std::string_view name, const TensorView& t);
  // Flags by name, replacing an earlier value; integers are taken for float flags. Retired names are accepted with a
  // warning.
  Status set_flag(std::string_view name, FlagValue v);
  // From text, as the command line gives it: "true", "32", "0.5".
  Status set_flag_text(std::string_view name, std::string_view text);
  // What a caller should change: a deprecated function, a retired flag. A context's log gets each once, when the call
  // runs.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // The tensors this call produces given what was set: those always produced and those its flags ask for. Of a
  // backward: gradients of all differentiable inputs that are present. Checks the call first.
  struct Output {
    std::string name;  // "out.o", "grad.q"
    DType dtype;
    std::vector<std::int64_t> shape;  // -1: the host cannot tell (chunks of packed sequences on a device)
    // Present: the call writes a part of this output, so its memory must hold these values first (or be this memory;
    // left unbound, the call writes there).
    TensorView contents{};
  };
  Result<std::vector<Output>> outputs(const Context& ctx);
  // Binds memory to one of outputs(); an output left unbound is not computed.
  Status bind(std::string_view output_name, const TensorView& t);

  Result<Route> explain(const Context& ctx) const { return explain_call(ctx, *entry_, args_.get()); }
  Result<std::size_t> workspace_bytes(const Context& ctx) const { return workspace_call(ctx, *entry_, args_.get()); }
  Status run(const Context& ctx) const {
    log_warnings(ctx);
    return run_call(ctx, *entry_, args_.get());
  }
  Status run(const Context& ctx, std::span<std::byte> workspace) const {
    return run(ctx, RunOptions{.workspace = workspace});
  }
  Status run(const Context& ctx, const RunOptions& options) const {
    log_warnings(ctx);
    return run_call(ctx, *entry_, args_.get(), options);
  }
  // Checked, dispatched, planned and sized once; later runs take this object's args as they are then.
  Result<PreparedCall> prepare(const Context& ctx) const {
    log_warnings(ctx);
    return PreparedCall::make(ctx, *entry_, args_.get());
  }

  // The backward of this function with the same inputs and flags set; Unsupported when it has none.
  Result<DynamicCall> backward(const Registry& registry) const;

  const void* args() const { return args_.get(); }
  void* args() { return args_.get(); }
  bool flag_on(std::string_view name) const;  // an output flag or bool flag that is set to true

 private:
  const Registry::Entry* entry_ = nullptr;
  std::shared_ptr<void> args_;
  std::vector<std::pair<std::string, TensorView>> inputs_;
  // What the lists of args_ point to.
  struct Lists {
    std::map<const ArgSpec*, std::vector<TensorView>> of;
  };
  std::shared_ptr<Lists> lists_;
  struct SetFlag {
    std::string flag, given_as;  // they differ when a retired name was used
    FlagValue value;
  };
  std::vector<SetFlag> flags_;
  std::vector<std::string> warnings_;
  std::vector<const void*> warned_about_;  // of each warning, what a context knows it by
  bool paired_input_ = false;

  TensorView& place(const ArgSpec& a, std::int64_t element);
  std::string output_name(const ArgSpec& a, std::size_t element) const;
  void warn(const void* about, std::string text);
  void log_warnings(const Context& ctx) const;

 public:
  DynamicCall() = default;  // empty; made useful by make()
};

}  // namespace fla
