#include "fla/registry/plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <utility>

#include "fla/core/dlpack.h"
#include "fla/core/threads.h"
#include "fla/plugin.h"

namespace fla {

namespace {

constexpr std::size_t kMostArguments = 64, kMostFlags = 32;
constexpr std::size_t kAlign = 64;  // of a plug-in's workspace

Status bad(const std::string& path, const std::string& text) {
  return {Code::InvalidArgument, "plug-in " + path + ": " + text};
}

// One function of a plug-in, as its three erased kernels share it. Names and functions are copied: nothing of the
// plug-in's own memory is read again after loading.
struct Served {
  std::string plugin, kernel;
  fla_plugin_function entry{};
  bool backward = false;
  std::vector<std::vector<std::string>> names;  // of spec.args; of a list those of its tensors

  // Whether the interface has room for the call's tensors.
  static bool has_room(const FunctionSpec& spec, const void* args) {
    std::size_t count = 0;
    for (const ArgSpec& a : spec.args)
      for (const TensorView& t : a.get.views(args)) count += t ? 1 : 0;
    return count <= kMostArguments;
  }
};

// The C view of one call. Shapes and strides are copies, so a plug-in cannot change the caller's.
class CallView {
 public:
  enum class Data : std::uint8_t { Hidden, Shown };

  CallView(const Served& served, const void* args, const CallInfo& info, Data data) {
    call_.size = sizeof call_;
    call_.function = info.spec.name.c_str();
    call_.is_backward = served.backward ? 1 : 0;
    for (std::size_t i = 0; i < info.spec.args.size(); ++i) {
      const ArgSpec& a = info.spec.args[i];
      const TensorList views = a.get.views(args);
      for (std::size_t element = 0; element < views.size(); ++element) {
        if (!views[element]) continue;
        TensorView& copy = views_[call_.tensor_count];
        copy = views[element];
        fla_plugin_tensor& out = tensors_[call_.tensor_count++];
        out.name = served.names[i][element].c_str();
        out.is_output = a.role == Role::Output || a.role == Role::Gradient ? 1 : 0;
        out.tensor = to_dlpack(copy);
        if (data == Data::Hidden) out.tensor.data = nullptr;
      }
    }
    for (const FlagSpec& f : info.spec.flags) {
      if (!f.value || !f.retired_for.empty()) continue;
      const FlagValue v = f.value(args);
      fla_plugin_flag& out = flags_[call_.flag_count++];
      out.name = f.name.c_str();
      out.is_default = v == f.def ? 1 : 0;
      if (const auto* b = std::get_if<bool>(&v)) {
        out.type = FLA_PLUGIN_BOOL;
        out.i = *b ? 1 : 0;
        out.d = static_cast<double>(out.i);
      } else if (const auto* i = std::get_if<std::int64_t>(&v)) {
        out.type = FLA_PLUGIN_INT;
        out.i = *i;
        out.d = static_cast<double>(*i);
      } else if (const auto* d = std::get_if<double>(&v)) {
        out.type = FLA_PLUGIN_DOUBLE;
        out.d = *d;
      }
    }
    call_.tensors = tensors_.data();
    call_.flags = flags_.data();
    call_.device = {info.device.type == DeviceType::Cuda ? kDLCUDA : kDLCPU, info.device.index};
    call_.threads = std::max(info.threads, 1);
    call_.message = message_.data();
    call_.message_size = message_.size();
  }

  fla_plugin_call& call() { return call_; }
  std::string message() {
    message_.back() = '\0';
    return message_.data();
  }

 private:
  fla_plugin_call call_{};
  std::array<TensorView, kMostArguments> views_;
  std::array<fla_plugin_tensor, kMostArguments> tensors_{};
  std::array<fla_plugin_flag, kMostFlags> flags_{};
  std::array<char, 512> message_{};
};

void parallel_for(const fla_plugin_call* call, std::int64_t tasks, void (*body)(void*, std::int64_t, int), void* user) {
  static_cast<ThreadPool*>(call->host)->run(tasks, [=](std::int64_t task, int worker) { body(user, task, worker); });
}

Verdict verify_plugin(const Served& s, const void* args, const CallInfo& info) {
  if (!Served::has_room(info.spec, args)) return reject("needs at most " + std::to_string(kMostArguments) + " tensors");
  if (s.entry.verify == nullptr) return accept();
  CallView view(s, args, info, CallView::Data::Hidden);
  if (s.entry.verify(&view.call()) != 0) return accept();
  std::string reason = view.message();
  return reject(reason.empty() ? "refused without a reason" : std::move(reason));
}

std::size_t plugin_workspace(const Served& s, const void* args, const CallInfo& info) {
  if (s.entry.workspace == nullptr) return 0;
  CallView view(s, args, info, CallView::Data::Hidden);
  const std::size_t need = s.entry.workspace(&view.call());
  if (need == 0) return 0;
  // Whole lines, and room to align them in memory that may start anywhere.
  if (need > std::numeric_limits<std::size_t>::max() - 2 * kAlign) return std::numeric_limits<std::size_t>::max();
  return (need + kAlign - 1) / kAlign * kAlign + kAlign - 1;
}

Status launch_plugin(const Served& s, const void* args, const CallInfo& info, const LaunchInfo& l) {
  CallView view(s, args, info, CallView::Data::Shown);
  const std::span<std::byte> given = l.workspace;
  fla_plugin_call& call = view.call();
  if (!given.empty()) {
    // The last place that is aligned, so that its end is the end of what was given.
    call.workspace_bytes = given.size() - (kAlign - 1);
    const auto end = reinterpret_cast<std::uintptr_t>(given.data() + given.size());
    const std::size_t after = (end - call.workspace_bytes) % kAlign;
    call.workspace = given.data() + (given.size() - call.workspace_bytes - after);
  }
  if (info.device.type == DeviceType::Cpu && l.pool != nullptr) {
    call.host = l.pool;
    call.parallel_for = parallel_for;
  } else {
    call.stream = l.stream.handle;
  }
  const std::string who = info.spec.name + ": " + s.plugin + ": ";
  fla_code code = FLA_INTERNAL;
  try {
    code = (s.backward ? s.entry.backward : s.entry.forward)(&call);
  } catch (const std::exception& e) {
    return {Code::Internal, who + "the plug-in threw: " + e.what()};
  } catch (...) {
    return {Code::Internal, who + "the plug-in threw"};
  }
  if (code == FLA_OK) return {};
  const std::string text = view.message();
  switch (code) {
    case FLA_OUT_OF_MEMORY:
    case FLA_DEVICE_ERROR: return {static_cast<Code>(code), who + (text.empty() ? "failed" : text)};
    case FLA_INVALID_ARGUMENT:
    case FLA_UNSUPPORTED:
      return {Code::Internal,
              who + "accepted the call, then refused to compute it" + (text.empty() ? "" : ": " + text)};
    case FLA_INTERNAL: return {Code::Internal, who + (text.empty() ? "failed" : text)};
    default: break;
  }
  return {Code::Internal, who + "returned " + std::to_string(static_cast<long long>(code)) + ", which is no fla_code"};
}

class PluginPlan final : public Plan {
 public:
  PluginPlan(const Served& s, const void* args, const CallInfo& info)
      : served_(s), args_(args), info_(info), workspace_(plugin_workspace(s, args, info)) {}
  KernelName kernel() const override { return {served_.kernel}; }
  std::size_t workspace() const override { return workspace_; }
  bool wants_alignment() const override { return true; }  // its verifier saw the tensors' memory
  void rebind() override {}
  Status launch(const LaunchInfo& l) const override { return launch_plugin(served_, args_, info_, l); }

 private:
  const Served& served_;
  const void* args_;
  const CallInfo info_;
  std::size_t workspace_;
};

Status check_name(const std::string& path, const char* given) {
  const std::string name = given != nullptr ? given : "";
  const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
  if (!plain) return bad(path, "name: expected lower-case letters, digits and _, got '" + name + "'");
  for (const char* taken : {"cpu", "cuda", kReference})
    if (name == taken) return bad(path, "name: '" + name + "' is a backend of the library's own; choose another");
  return {};
}

// Adds forward and backward of one entry to `kernels`, once everything about it is known to be right.
Status check_function(const Registry& r, const std::string& path, const fla_plugin& p, std::size_t index,
                      std::vector<std::pair<const FunctionSpec*, std::shared_ptr<Served>>>& kernels) {
  const fla_plugin_function& f = p.functions[index];
  const std::string at = "functions[" + std::to_string(index) + "]";
  if (f.function == nullptr) return bad(path, at + ": expected the name of a function, got NULL");
  const std::string name = f.function;
  const Registry::Entry* forward = r.find(name);
  if (forward == nullptr) {
    std::string near;
    for (const auto& n : r.nearest(name)) near += (near.empty() ? "" : ", ") + n;
    return bad(path, at + ": unknown function '" + name + "'; nearest: " + near);
  }
  if (forward->spec.is_backward())
    return bad(path, at + ": '" + name + "' is a backward: name " + forward->spec.forward + " and set .backward");
  for (std::size_t i = 0; i < index; ++i)
    if (name == p.functions[i].function)
      return bad(path, at + ": '" + name + "' is there already, as functions[" + std::to_string(i) + "]");
  if (f.forward == nullptr && f.backward == nullptr)
    return bad(path, at + ": '" + name + "': expected forward, backward or both, got neither");
  if (f.backward != nullptr && forward->spec.backward.empty())
    return bad(path, at + ": '" + name + "' has no backward");
  for (const auto& c : forward->candidates)
    if (c.backend->name == p.name)
      return bad(path,
                 "name: operation " + forward->spec.operation + " has a backend '" + c.backend->name + "' already");
  for (const bool backward : {false, true}) {
    if ((backward ? f.backward : f.forward) == nullptr) continue;
    const FunctionSpec& spec = backward ? r.find(forward->spec.backward)->spec : forward->spec;
    if (spec.args.size() > kMostArguments || spec.flags.size() > kMostFlags)
      return {Code::Internal, spec.name + ": more arguments than the plug-in interface passes on"};
    auto served = std::make_shared<Served>();
    served->plugin = p.name;
    served->kernel = f.kernel != nullptr ? f.kernel : p.name;
    served->entry = f;
    served->backward = backward;
    for (const ArgSpec& a : spec.args) {
      std::vector<std::string>& names = served->names.emplace_back();
      for (std::size_t i = 0; i < (a.list() ? kMostArguments : 1); ++i) names.push_back(a.name_in_files(i));
    }
    kernels.emplace_back(&spec, std::move(served));
  }
  return {};
}

// What the plug-in says about itself, or why it cannot be used.
Result<const fla_plugin*> describe(void* library, const std::string& path) {
  const auto get = reinterpret_cast<fla_plugin_get_fn>(dlsym(library, FLA_PLUGIN_ENTRY));
  if (get == nullptr) return bad(path, "has no entry point " FLA_PLUGIN_ENTRY " (fla/plugin.h)");
  const fla_plugin* p = nullptr;
  try {
    p = get(FLA_PLUGIN_ABI);
  } catch (...) {
    return bad(path, FLA_PLUGIN_ENTRY " threw");
  }
  const std::string ours = std::to_string(FLA_PLUGIN_ABI);
  if (p == nullptr) return bad(path, FLA_PLUGIN_ENTRY " returned NULL: it does not work with plug-in ABI " + ours);
  if (p->abi != FLA_PLUGIN_ABI)
    return bad(path, "is for plug-in ABI " + std::to_string(p->abi) + ", this library has " + ours +
                         ": compile it with this version's fla/plugin.h");
  if (Status s = check_name(path, p->name); !s) return s;
  if (p->device != kDLCPU && p->device != kDLCUDA)
    return bad(path, "device: expected kDLCPU (1) or kDLCUDA (2), got " + std::to_string(static_cast<int>(p->device)));
  if (p->functions == nullptr || p->function_count == 0) return bad(path, "functions: expected at least one, got none");
  return p;
}

}  // namespace

Result<Plugin> load_plugin(Registry& r, const std::string& path, const WrapKernel& wrap) {
  std::error_code error;
  const std::filesystem::path file = std::filesystem::absolute(path, error);
  if (error || !std::filesystem::exists(file, error)) return bad(path, "no such file");
  dlerror();
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return bad(path, std::string("cannot be loaded: ") + (why != nullptr ? why : "no reason given"));
  }
  std::vector<std::pair<const FunctionSpec*, std::shared_ptr<Served>>> kernels;
  const Result<const fla_plugin*> described = describe(library, path);
  Status sound = described.status();
  for (std::size_t i = 0; sound && i < (*described)->function_count; ++i)
    sound = check_function(r, path, **described, i, kernels);
  if (!sound) {
    dlclose(library);
    return sound;
  }

  const fla_plugin& p = **described;
  Plugin info;
  info.name = p.name;
  info.path = path;
  info.priority = p.priority;
  info.device = p.device == kDLCUDA ? DeviceType::Cuda : DeviceType::Cpu;
  Backend backend;
  backend.name = info.name;
  backend.package = "plug-in " + path;
  backend.env = "FLA_CPP_BACKEND_";
  for (const char c : info.name) backend.env += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  backend.priority = p.priority;
  backend.device = info.device;
  if (p.available != nullptr) backend.available = [available = p.available] { return available() != 0; };
  std::vector<std::string> operations;
  for (const auto& [spec, served] : kernels) {
    if (std::find(operations.begin(), operations.end(), spec->operation) == operations.end()) {
      operations.push_back(spec->operation);
      r.add_backend(spec->operation, backend);
    }
    info.functions.push_back(spec->name);
    ErasedKernel k;
    k.function = spec->name;
    k.backend = info.name;
    k.name = served->kernel;
    k.make = [s = served](const void* a, const CallInfo& c, PlanMemory& memory, Verdict& v) -> Plan* {
      v = verify_plugin(*s, a, c);
      return v.accepted ? memory.make<PluginPlan>(*s, a, c) : nullptr;
    };
    static_cast<void>(r.add_kernel(wrap ? wrap(std::move(k), *spec) : std::move(k)));  // check_function saw the names
  }
  return info;
}

class PluginAccess {
 public:
  static Registry& global() { return Registry::instance(); }
};

Result<Plugin> load_plugin(const std::string& path, const WrapKernel& wrap) {
  return load_plugin(PluginAccess::global(), path, wrap);
}

}  // namespace fla
