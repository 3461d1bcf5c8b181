// What a backend registers: kernels, and the plans that they make of calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fla/core/context.h"
#include "fla/core/device.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/registry/call.h"
#include "fla/registry/kernel_name.h"
#include "fla/registry/spec.h"

namespace fla {

// What a verifier and a plan know beside the arguments.
struct CallInfo {
  const FunctionSpec& spec;
  const Dims& dims;
  Device device;
  int threads;                // of the context's pool
  const DeviceInfo* gpu;      // limits of the tensors' device where that is an accelerator, else nullptr
  bool texts = true;          // whether anybody will read why a kernel refuses
  std::string_view kernel{};  // the one kernel that may serve the call; empty: any
};

// A verifier's answer. A refusal says what was needed and what came.
struct Verdict {
  bool accepted = true;
  std::string reason;
};
inline Verdict accept() { return {}; }
inline Verdict reject(std::string reason) { return {false, std::move(reason)}; }
// `text` makes the reason, and is only asked where somebody wants it: a refusal costs a running call nothing.
template <typename Text>
Verdict reject(const CallInfo& c, Text&& text) {
  return c.texts ? Verdict{false, std::forward<Text>(text)()} : Verdict{false, {}};
}

// What a launch has beside the plan.
struct LaunchInfo {
  ThreadPool* pool;
  Stream stream;  // of the tensors' device, where that is an accelerator
  std::span<std::byte> workspace;
  std::span<std::byte> kept;  // empty: nothing is kept, or was
};

// A call as one kernel will run it: what it was translated into, what was decided. Made once from checked arguments;
// lives in memory that the call has for it, beside the arguments, which stay where they are.
class Plan {
 public:
  Plan() = default;
  virtual ~Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  virtual KernelName kernel() const = 0;
  virtual std::size_t workspace() const { return 0; }
  // Bytes that a forward can keep for its backward, or that a backward makes use of, and their layout; 0: none.
  virtual std::size_t keeps() const { return 0; }
  virtual std::uint64_t layout() const { return 0; }
  virtual std::string text() const { return {}; }  // how the call is cut, for explain
  // Whether the kernel makes use of the alignment of the tensors' memory beyond their elements'.
  virtual bool wants_alignment() const { return false; }
  // The arguments' views point to other memory now.
  virtual void rebind() = 0;
  virtual Status launch(const LaunchInfo& l) const = 0;
};

// Where a plan is made: on the stack of a call, or in a prepared one.
class PlanMemory {
 public:
  PlanMemory() = default;
  ~PlanMemory() { clear(); }
  PlanMemory(const PlanMemory&) = delete;
  PlanMemory& operator=(const PlanMemory&) = delete;

  template <typename P, typename... Args>
  P* make(Args&&... args) {
    static_assert(sizeof(P) <= kBytes, "a plan has to fit: raise kBytes");
    static_assert(alignof(P) <= kAlign, "a plan has to fit: raise kAlign");
    clear();
    P* p = new (bytes_) P(std::forward<Args>(args)...);
    plan_ = p;
    return p;
  }
  Plan* plan() const { return plan_; }
  void clear() {
    if (plan_ != nullptr) plan_->~Plan();
    plan_ = nullptr;
  }

 private:
  static constexpr std::size_t kBytes = 24576, kAlign = 64;
  Plan* plan_ = nullptr;
  alignas(kAlign) std::byte bytes_[kBytes];
};

// An alternative implementation of some of an operation's functions.
struct Backend {
  std::string name;            // identity: adding the same name again replaces the earlier object
  std::string package;         // external package it stands for; informative
  std::string env;             // environment variable whose value "0" disables it; empty: always enabled
  bool default_enable = true;  // when the variable is unset
  int priority = 5;            // lower is tried first; equal ones in order of registration
  DeviceType device = DeviceType::Cpu;
  std::function<bool()> available;       // empty: always
  std::function<std::string()> why_not;  // what is missing where it is not available; empty: its package
  // Limits of its device of that index, where it is an accelerator; nullptr: it cannot be used. The object stays.
  const DeviceInfo* (*limits)(int index) = nullptr;
  // Copies from its device's memory and waits for all that was queued on the stream; empty: the host can read it.
  std::function<Status(void* to, const void* from, std::size_t bytes, Stream stream)> read;
  std::uint64_t order = 0;  // set by the registry
};

// One backend's implementation of one function, types erased. One backend may have several for a function: they are
// tried in order of registration, and each may choose among several kernels that share its translation.
struct ErasedKernel {
  std::string function;
  std::string backend;
  std::string name;  // of this implementation: "diag.chunk"; unique for its function and backend
  // Makes the call's plan in the memory; nullptr: refused, and the verdict says why.
  std::function<Plan*(const void* args, const CallInfo&, PlanMemory&, Verdict&)> make;
  // The names of all kernels that it may choose on such a device; empty: its own name is the only one.
  std::function<std::vector<std::string>(const DeviceInfo*)> kernels{};
  bool complete = true;  // false: accepts calls but has no implementation of them, a defect

  std::vector<std::string> kernel_names(const DeviceInfo* gpu) const {
    return kernels ? kernels(gpu) : std::vector<std::string>{name};
  }
};

// What a family registers that has a kernel of its own for a function. The function's id fixes the args type. Families
// on an engine register that (fla/engine/common).
template <typename A>
struct Kernel {
  FunctionId<A> function;
  const char* backend;
  const char* name;
  std::function<Verdict(const A&, const CallInfo&)> verify;                    // empty: accepts
  std::function<std::size_t(const A&, const CallInfo&)> workspace;             // empty: none
  std::function<Status(const A&, const CallInfo&, const LaunchInfo&)> launch;  // empty: a defect, see Route
  std::function<std::string(const A&, const CallInfo&)> plan{};                // for explain
};

namespace detail {

template <typename A>
class KernelPlan final : public Plan {
 public:
  KernelPlan(const Kernel<A>& k, const A& args, const CallInfo& info)
      : kernel_(k), args_(args), info_(info), workspace_(k.workspace ? k.workspace(args, info) : 0) {}
  KernelName kernel() const override { return {kernel_.name}; }
  std::size_t workspace() const override { return workspace_; }
  std::string text() const override { return kernel_.plan ? kernel_.plan(args_, info_) : std::string(); }
  void rebind() override {}
  Status launch(const LaunchInfo& l) const override { return kernel_.launch(args_, info_, l); }

 private:
  const Kernel<A>& kernel_;
  const A& args_;
  const CallInfo info_;
  std::size_t workspace_;
};

}  // namespace detail

template <typename A>
ErasedKernel erase(Kernel<A> k) {
  ErasedKernel e{.function = k.function.name, .backend = k.backend, .name = k.name, .make = {}};
  const bool complete = e.complete = static_cast<bool>(k.launch);
  e.make = [k = std::move(k), complete](const void* a, const CallInfo& c, PlanMemory& memory, Verdict& v) -> Plan* {
    const A& args = *static_cast<const A*>(a);
    if (k.verify) v = k.verify(args, c);
    if (!v.accepted || !complete) return nullptr;
    return memory.make<detail::KernelPlan<A>>(k, args, c);
  };
  return e;
}

}  // namespace fla
