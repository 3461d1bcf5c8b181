#include "tools/plugin/guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "fmt/format.h"
#include "tools/common/buffer.h"

namespace fla::tools {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in every float type
constexpr std::byte kBeside{0xa5};  // what lies on the tensor's own pages before and after it
// Beyond that many bytes for each one that is used, gaps between elements are neither filled nor looked at.
constexpr std::int64_t kSparse = 16;
constexpr std::size_t kMostWorkspace = std::size_t{1} << 40;

std::atomic<PluginTrace*> the_trace{nullptr};
std::atomic<int> at_speed{0};

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void put(char* to, std::size_t size, std::string_view text) {
  const std::size_t n = std::min(size - 1, text.size());
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

// While one lives, this thread is in the plug-in's code.
class Inside {
 public:
  explicit Inside(const std::string& where) : trace_(the_trace.load()) {
    if (trace_ == nullptr) return;
    put(trace_->where, sizeof trace_->where, where);
    trace_->since = now_ns();
    ++trace_->inside;
  }
  ~Inside() {
    if (trace_ != nullptr) --trace_->inside;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  PluginTrace* trace_;
};

// ---- guard pages

// Mappings that a fault may be in. Read by the signal handler, so nothing here moves.
struct Region {
  std::atomic<bool> used{false};
  std::uintptr_t map = 0, map_end = 0, begin = 0, end = 0;
  bool read_only = false;
  char name[64] = {};
};
constexpr std::size_t kRegions = 1024;
std::array<Region, kRegions> regions;

std::size_t page() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Address space on both sides that cannot be touched; wide, so that a stray index still lands in its own tensor's.
constexpr std::size_t kGuard = std::size_t{1} << 20;

// `bytes` of memory that end, or begin, where such a guard does.
class Pages {
 public:
  Pages(std::size_t bytes, bool at_end, const std::string& name) : bytes_(bytes) {
    inner_ = std::max<std::size_t>((bytes + page() - 1) / page(), 1) * page();
    void* p = mmap(nullptr, inner_ + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    map_ = static_cast<std::byte*>(p);
    if (mprotect(map_ + kGuard, inner_, PROT_READ | PROT_WRITE) != 0) {
      munmap(map_, inner_ + 2 * kGuard);
      throw std::bad_alloc();
    }
    begin_ = map_ + kGuard + (at_end ? inner_ - bytes : 0);
    for_slack([](std::byte& b) { b = kBeside; });
    for (Region& r : regions)
      if (!r.used.exchange(true)) {
        region_ = &r;
        r.map = reinterpret_cast<std::uintptr_t>(map_);
        r.map_end = r.map + inner_ + 2 * kGuard;
        r.begin = reinterpret_cast<std::uintptr_t>(begin_);
        r.end = r.begin + bytes;
        r.read_only = false;
        put(r.name, sizeof r.name, name);
        break;
      }
  }
  ~Pages() {
    if (region_ != nullptr) region_->used = false;
    munmap(map_, inner_ + 2 * kGuard);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const { return begin_; }
  std::size_t size() const { return bytes_; }
  void make_read_only() {
    if (mprotect(map_ + kGuard, inner_, PROT_READ) == 0 && region_ != nullptr) region_->read_only = true;
  }
  // Bytes of its own pages, before or after it, that somebody has written to.
  bool slack_intact() const {
    bool intact = true;
    for_slack([&](const std::byte& b) { intact = intact && b == kBeside; });
    return intact;
  }

 private:
  template <typename Fn>
  void for_slack(Fn&& fn) const {
    for (std::byte* p = map_ + kGuard; p < begin_; ++p) fn(*p);
    for (std::byte* p = begin_ + bytes_; p < map_ + kGuard + inner_; ++p) fn(*p);
  }
  std::size_t bytes_, inner_ = 0;
  std::byte *map_ = nullptr, *begin_ = nullptr;
  Region* region_ = nullptr;
};

void on_fault(int signal, siginfo_t* info, void*) {
  PluginTrace* trace = the_trace.load();
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (trace != nullptr && trace->fault[0] == '\0')
    for (const Region& r : regions) {
      if (!r.used.load() || at < r.map || at >= r.map_end) continue;
      const auto text = [&](const char* what, std::uintptr_t by) {
        std::snprintf(trace->fault, sizeof trace->fault, "%s %s (%llu bytes off)", what, r.name,
                      static_cast<unsigned long long>(by));
      };
      if (at >= r.end)
        text("touched memory past the end of", at - r.end);
      else if (at < r.begin)
        text("touched memory before the begin of", r.begin - at);
      else if (r.read_only)
        std::snprintf(trace->fault, sizeof trace->fault, "wrote to %s, which it may only read", r.name);
      break;
    }
  // The instruction runs again and ends the process as it would have; a signal that was sent must be sent again.
  ::signal(signal, SIG_DFL);
  if (info->si_code <= 0) raise(signal);
}

void install_fault_handler() {
  static std::vector<std::byte> stack(std::size_t{1} << 16);  // a fault may be the stack's own overflow
  stack_t s{};
  s.ss_sp = stack.data();
  s.ss_size = stack.size();
  sigaltstack(&s, nullptr);
  struct sigaction a {};
  a.sa_sigaction = on_fault;
  a.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &a, nullptr);
  sigaction(SIGBUS, &a, nullptr);
}

// ---- one guarded call

bool is_output(const ArgSpec& a) { return a.role == Role::Output || a.role == Role::Gradient; }

std::string describe(const FunctionSpec& spec, const void* args) {
  std::string s = spec.name;
  for (const ArgSpec& a : spec.args) {
    const TensorList views = a.get.views(args);
    for (std::size_t i = 0; i < views.size(); ++i)
      if (const TensorView& t = views[i]; t)
        s += ", " + a.name_in_files(i) + " " + name_of(t.dtype) + " " + shape_string(t.dims());
  }
  for (const FlagSpec& f : spec.flags)
    if (f.value && f.retired_for.empty())
      if (const FlagValue v = f.value(args); !(v == f.def)) s += ", " + f.name + "=" + to_string(v);
  return s;
}

// A tensor's copy on pages of its own, with the same strides.
struct Guarded {
  const ArgSpec* arg;
  std::string name;
  TensorView original, view;
  std::unique_ptr<Pages> pages;
  bool in_place = false;  // also the call's initial state: written and read
  bool sparse = false;

  Guarded(const ArgSpec& a, std::size_t element, const TensorView& t, bool at_end)
      : arg(&a), name(a.name_in_files(element)), original(t), view(t) {
    const auto size = static_cast<std::int64_t>(size_of(t.dtype));
    std::int64_t low = 0, high = 0;
    for (int i = 0; i < t.ndim; ++i) {
      const std::int64_t reach = (std::max<std::int64_t>(t.dim(i), 1) - 1) * t.stride[static_cast<std::size_t>(i)];
      (reach > 0 ? high : low) += reach;
    }
    const std::int64_t extent = t.numel() == 0 ? 0 : (high - low + 1) * size;
    sparse = extent > kSparse * std::max<std::int64_t>(t.numel() * size, 4096);
    pages = std::make_unique<Pages>(static_cast<std::size_t>(extent), at_end, name);
    if (!sparse) std::memset(pages->data(), static_cast<int>(kPoison), pages->size());
    view.data = pages->data() - low * size;
    if (t.numel() == 0) view.data = pages->data();
  }

  void copy_elements(const TensorView& from, const TensorView& to) const {
    const std::size_t size = size_of(from.dtype);
    std::vector<const std::byte*> source;
    source.reserve(static_cast<std::size_t>(from.numel()));
    for_each(from, [&](const std::byte* p) { source.push_back(p); });
    std::size_t i = 0;
    for_each(to, [&](std::byte* p) { std::memcpy(p, source[i++], size); });
  }
  void fill_from_original() const { copy_elements(original, view); }
  void poison() const {
    const std::size_t size = size_of(view.dtype);
    for_each(view, [&](std::byte* p) { std::memset(p, static_cast<int>(kPoison), size); });
  }

  // "out.o: 3 of 640 elements were not written, the first at [0,1,0,2]", or nothing.
  std::string unwritten() const {
    const std::size_t size = size_of(view.dtype);
    std::int64_t i = 0, first = -1, count = 0;
    for_each(view, [&](const std::byte* p) {
      if (std::all_of(p, p + size, [](std::byte b) { return b == kPoison; })) {
        if (first < 0) first = i;
        ++count;
      }
      ++i;
    });
    if (count == 0) return "";
    Shape index(static_cast<std::size_t>(view.ndim));
    for (int axis = view.ndim - 1; axis >= 0; --axis) {
      index[static_cast<std::size_t>(axis)] = first % view.dim(axis);
      first /= view.dim(axis);
    }
    return fmt::format("{}: {} of {} elements were not written, the first at {}", name, count, view.numel(),
                       shape_string(index));
  }
  bool gaps_intact() const {
    const std::size_t size = size_of(view.dtype);
    if (sparse || static_cast<std::size_t>(view.numel()) * size == pages->size()) return true;
    std::vector<bool> element(pages->size(), false);
    for_each(view, [&](const std::byte* p) {
      for (std::size_t i = 0; i < size; ++i) element[static_cast<std::size_t>(p - pages->data()) + i] = true;
    });
    for (std::size_t i = 0; i < element.size(); ++i)
      if (!element[i] && pages->data()[i] != kPoison) return false;
    return true;
  }
};

bool same_memory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim && a.shape == b.shape && a.stride == b.stride;
}

Status run_guarded(const ErasedKernel& k, const FunctionSpec& spec, const void* args, const CallInfo& info,
                   const LaunchInfo& given) {
  // Tensors end at a guard page in one call and begin at one in the next.
  static std::atomic<unsigned> calls{0};
  const bool at_end = calls.fetch_add(1) % 2 == 0;

  const std::shared_ptr<void> copy = spec.copy_args(args);
  std::deque<Guarded> tensors;
  // Outputs last, so that a state in place finds its input.
  for (const bool outputs : {false, true})
    for (const ArgSpec& a : spec.args) {
      if (is_output(a) != outputs) continue;
      const TensorList views = a.get.views(args);
      for (std::size_t i = 0; i < views.size(); ++i) {
        const TensorView& t = views[i];
        if (!t) continue;
        TensorView& guarded = a.get.views(copy.get())[i];
        Guarded* shared = nullptr;
        for (Guarded& other : tensors)
          if (outputs && t.numel() > 0 && same_memory(other.original, t)) shared = &other;
        if (shared != nullptr) {
          shared->in_place = true;
          guarded = shared->view;
          continue;
        }
        Guarded& made = tensors.emplace_back(a, i, t, at_end);
        if (outputs)
          made.poison();
        else
          made.fill_from_original();
        guarded = made.view;
      }
    }
  for (Guarded& t : tensors)
    if (!is_output(*t.arg) && !t.in_place) t.pages->make_read_only();
  const Pages workspace(given.workspace.size(), true, "the workspace");
  std::memset(workspace.data(), static_cast<int>(kPoison), workspace.size());

  const std::string phase = spec.is_backward() ? "backward of " : "forward of ";
  Status s;
  {
    const Inside inside(phase + describe(spec, args));
    PlanMemory memory;
    Verdict v;
    const Plan* plan = k.make(copy.get(), info, memory, v);
    LaunchInfo there = given;
    there.workspace = {workspace.data(), workspace.size()};
    s = plan != nullptr
            ? plan->launch(there)
            : Status(Code::Internal, spec.name + ": " + k.backend + ": took the call, then refused it: " + v.reason);
  }
  const auto wrong = [&](const std::string& text) {
    return Status(Code::Internal, spec.name + ": " + k.backend + ": " + text);
  };
  for (const Guarded& t : tensors) {
    if (!t.pages->slack_intact()) return wrong(t.name + ": memory beside it was written to");
    if (!t.gaps_intact()) return wrong(t.name + ": memory between its elements was written to");
  }
  if (!workspace.slack_intact()) return wrong("workspace: memory beside it was written to");
  if (!s) return s;
  for (const Guarded& t : tensors)
    if (is_output(*t.arg) && !t.in_place)
      if (const std::string text = t.unwritten(); !text.empty()) return wrong(text);
  for (const Guarded& t : tensors)
    if (is_output(*t.arg) || t.in_place) t.copy_elements(t.view, t.original);
  return s;
}

// A plug-in's plan, whose every call is told to the trace and runs on guarded copies.
class GuardedPlan final : public Plan {
 public:
  GuardedPlan(std::shared_ptr<const ErasedKernel> k, const FunctionSpec& spec, const void* args, const CallInfo& info,
              std::unique_ptr<PlanMemory> memory)
      : kernel_(std::move(k)), spec_(spec), args_(args), info_(info), memory_(std::move(memory)) {}
  KernelName kernel() const override { return memory_->plan()->kernel(); }
  // What nobody has is not asked for; the launch says so.
  std::size_t workspace() const override { return too_large() ? 0 : memory_->plan()->workspace(); }
  bool wants_alignment() const override { return memory_->plan()->wants_alignment(); }
  void rebind() override { memory_->plan()->rebind(); }
  Status launch(const LaunchInfo& l) const override {
    if (too_large())
      return {Code::Internal, fmt::format("{}: {}: workspace: asks for {} bytes", spec_.name, kernel_->backend,
                                          memory_->plan()->workspace())};
    if (info_.device.type != DeviceType::Cpu || at_speed.load(std::memory_order_relaxed) > 0) {
      const Inside inside((spec_.is_backward() ? "backward of " : "forward of ") + spec_.name + " (timed)");
      return memory_->plan()->launch(l);
    }
    return run_guarded(*kernel_, spec_, args_, info_, l);
  }

 private:
  bool too_large() const { return memory_->plan()->workspace() > kMostWorkspace; }

  std::shared_ptr<const ErasedKernel> kernel_;
  const FunctionSpec& spec_;
  const void* args_;
  const CallInfo info_;
  std::unique_ptr<PlanMemory> memory_;
};

ErasedKernel guard(ErasedKernel kernel, const FunctionSpec& spec) {
  const auto k = std::make_shared<const ErasedKernel>(std::move(kernel));
  ErasedKernel g;
  g.function = k->function;
  g.backend = k->backend;
  g.name = k->name;
  g.make = [k, &spec](const void* args, const CallInfo& info, PlanMemory& memory, Verdict& v) -> Plan* {
    auto own = std::make_unique<PlanMemory>();
    {
      const Inside inside("verify of " + describe(spec, args));  // and of its workspace
      if (k->make(args, info, *own, v) == nullptr) return nullptr;
    }
    return memory.make<GuardedPlan>(k, spec, args, info, std::move(own));
  };
  return g;
}

}  // namespace

PluginTrace* map_trace(const std::string& path) {
  int fd = -1;
  if (!path.empty()) {
    fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(PluginTrace)) != 0) return nullptr;
  }
  void* p = mmap(nullptr, sizeof(PluginTrace), PROT_READ | PROT_WRITE,
                 path.empty() ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  return p == MAP_FAILED ? nullptr : static_cast<PluginTrace*>(p);  // all zero is a fresh trace
}

void use_trace(PluginTrace* trace) { the_trace = trace; }

double seconds_inside(const PluginTrace& trace) {
  return trace.inside.load() > 0 ? static_cast<double>(now_ns() - trace.since.load()) * 1e-9 : 0.0;
}

std::string death_text(const PluginTrace& trace, int status, bool hung, double limit) {
  std::string text;
  if (hung) {
    text = fmt::format("the plug-in did not return within {:g} s", limit);
  } else if (WIFSIGNALED(status)) {
    const int n = WTERMSIG(status);
    const char* name = sigabbrev_np(n);
    text = fmt::format("the plug-in died of signal {} (SIG{}: {})", n, name != nullptr ? name : "?", strsignal(n));
  } else {
    text = fmt::format("the plug-in ended the process (exit status {})", WEXITSTATUS(status));
  }
  if (trace.fault[0] != '\0') text += std::string(": it ") + trace.fault + ",";
  if (trace.inside.load() > 0) return text + " in " + trace.where;
  return text + " outside of its own functions: it may have damaged memory or left a thread running";
}

Result<Plugin> load_guarded_plugin(const std::string& path) {
  install_fault_handler();
  const Inside inside("loading");
  return load_plugin(path, guard);
}

PluginAtSpeed::PluginAtSpeed() { ++at_speed; }
PluginAtSpeed::~PluginAtSpeed() { --at_speed; }

}  // namespace fla::tools
