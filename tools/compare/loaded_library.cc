#include "tools/compare/loaded_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "fla/core/dlpack.h"

namespace fla::tools {
namespace {

template <typename Fn>
void find(void* handle, const char* name, Fn& fn, std::string& missing) {
  fn = reinterpret_cast<Fn>(dlsym(handle, name));
  if (fn == nullptr && missing.empty()) missing = name;
}

}  // namespace

Result<std::shared_ptr<LoadedLibrary>> LoadedLibrary::open(const std::filesystem::path& path) {
  std::shared_ptr<LoadedLibrary> l(new LoadedLibrary);
  // A build with CUDA holds a runtime of its own, which the driver may call until the process ends.
  l->handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (l->handle_ == nullptr) {
    const char* why = dlerror();
    return Status(Code::InvalidArgument, "cannot load " + path.string() + ": " + (why != nullptr ? why : "?"));
  }
  std::string missing;
  Api& a = l->api_;
  find(l->handle_, "fla_build_info", a.build_info, missing);
  find(l->handle_, "fla_last_error", a.last_error, missing);
  find(l->handle_, "fla_context_create", a.context_create, missing);
  find(l->handle_, "fla_context_destroy", a.context_destroy, missing);
  find(l->handle_, "fla_call_create", a.call_create, missing);
  find(l->handle_, "fla_call_destroy", a.call_destroy, missing);
  find(l->handle_, "fla_call_set_tensor", a.set_tensor, missing);
  find(l->handle_, "fla_call_set_bool", a.set_bool, missing);
  find(l->handle_, "fla_call_set_int", a.set_int, missing);
  find(l->handle_, "fla_call_set_double", a.set_double, missing);
  find(l->handle_, "fla_call_output_count", a.output_count, missing);
  find(l->handle_, "fla_call_output", a.output, missing);
  find(l->handle_, "fla_call_bind", a.bind, missing);
  find(l->handle_, "fla_call_workspace", a.workspace, missing);
  find(l->handle_, "fla_call_run", a.run, missing);
  find(l->handle_, "fla_call_backend", a.backend, missing);
  if (!missing.empty())
    return Status(Code::InvalidArgument, path.string() + " has no " + missing +
                                             ": that commit is too old to be compared with; take a later one");
  return l;
}

LoadedLibrary::~LoadedLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

std::string LoadedLibrary::info(const char* key) const {
  const char* value = api_.build_info(key);
  return value != nullptr ? value : "";
}

Status LoadedLibrary::error(fla_code code) const { return {static_cast<Code>(code), api_.last_error()}; }

LoadedContext::LoadedContext(std::shared_ptr<LoadedLibrary> library, const CallOptions& options,
                             const std::vector<int>& processors)
    : library_(std::move(library)) {
  fla_context_options o{};
  o.size = sizeof o;
  o.threads = options.threads;
  o.affinity = processors.empty() ? nullptr : processors.data();
  o.affinity_count = processors.size();
  o.backend = options.backend.empty() ? nullptr : options.backend.c_str();
  if (const fla_code code = library_->api().context_create(&o, &context_); code != FLA_OK)
    refuse(library_->error(code));
}

LoadedContext::~LoadedContext() { library_->api().context_destroy(context_); }

LoadedCall::LoadedCall(const LoadedContext& ctx, const Case& c, bool backward) : library_(&ctx.library()) {
  const LoadedLibrary::Api& api = library_->api();
  const FunctionSpec& spec = c.spec();
  require(api.call_create(ctx.get(), (backward ? spec.backward : spec.name).c_str(), &call_));
  try {
    const FunctionSpec* called = backward ? &Registry::global().find(spec.backward)->spec : &spec;
    const auto set = [&](const std::string& name, const TensorView& t) {
      arguments_.push_back({name, t, false});
      give(arguments_.back(), t);
    };
    for (const auto& [name, v] : c.flags()) {
      if (called->find_flag(name) == nullptr) continue;
      if (const bool* b = std::get_if<bool>(&v)) require(api.set_bool(call_, name.c_str(), *b ? 1 : 0));
      if (const auto* i = std::get_if<std::int64_t>(&v)) require(api.set_int(call_, name.c_str(), *i));
      if (const auto* d = std::get_if<double>(&v)) require(api.set_double(call_, name.c_str(), *d));
    }
    for (const auto& name : c.input_names()) set(name, c.input(name));
    if (backward)
      for (const auto& of : c.upstream_names()) set("grad_out." + of, c.upstream(of));
    std::size_t count = 0;
    require(api.output_count(call_, &count));
    for (std::size_t i = 0; i < count; ++i) {
      fla_output o{};
      require(api.output(call_, i, &o));
      std::int64_t none = 0;
      DLTensor probe{};  // of no element: asks for the type alone
      probe.device.device_type = kDLCPU;
      probe.dtype = o.dtype;
      probe.ndim = 1;
      probe.shape = &none;
      const auto view = check(from_dlpack(probe));
      outputs_.push_back({o.name, view.dtype, {o.shape, o.shape + o.ndim}});
    }
  } catch (...) {
    api.call_destroy(call_);
    throw;
  }
}

LoadedCall::LoadedCall(LoadedCall&& other) noexcept
    : library_(other.library_),
      call_(std::exchange(other.call_, nullptr)),
      outputs_(std::move(other.outputs_)),
      arguments_(std::move(other.arguments_)) {}

LoadedCall::~LoadedCall() {
  if (call_ != nullptr) library_->api().call_destroy(call_);
}

void LoadedCall::require(fla_code code) const {
  if (code != FLA_OK) refuse(library_->error(code));
}

void LoadedCall::give(const Argument& a, const TensorView& t) {
  TensorView view = t;
  const DLTensor tensor = to_dlpack(view);
  const auto fn = a.output ? library_->api().bind : library_->api().set_tensor;
  require(fn(call_, a.name.c_str(), &tensor));
}

void LoadedCall::bind(const std::string& output, const TensorView& t) {
  arguments_.push_back({output, t, true});
  give(arguments_.back(), t);
}

void LoadedCall::add_to(DeviceImage& image) const {
  for (const Argument& a : arguments_)
    if (a.name != "cu_seqlens_cpu") image.add(a.host, a.name, a.output);
}

void LoadedCall::place(const DeviceImage& image) {
  for (const Argument& a : arguments_) give(a, image.there(a.host));
}

std::size_t LoadedCall::workspace() {
  std::size_t bytes = 0;
  require(library_->api().workspace(call_, &bytes));
  return bytes;
}

void LoadedCall::run(std::span<std::byte> workspace) {
  require(library_->api().run(call_, workspace.data(), workspace.size()));
}

std::string LoadedCall::backend() const { return library_->api().backend(call_); }

CallMemory::CallMemory(Device device, std::vector<LoadedCall*> calls) : calls_(std::move(calls)) {
  const auto most = [this] {
    std::size_t bytes = 0;
    for (LoadedCall* c : calls_) bytes = std::max(bytes, c->workspace());
    return bytes;
  };
  if (device.type == DeviceType::Cpu) {
    workspace_ = Buffer::bytes(most());
    return;
  }
  image_ = std::make_unique<DeviceImage>(device);
  for (const LoadedCall* c : calls_) c->add_to(*image_);
  const auto place = [this](std::size_t bytes) {
    check(image_->reserve(bytes));
    for (LoadedCall* c : calls_) c->place(*image_);
  };
  place(0);
  place(most());
  take_inputs();
}

void CallMemory::take_inputs() {
  if (image_)
    check(image_->upload());
  else
    std::memset(workspace_.span().data(), 0xff, workspace_.span().size());
}

void CallMemory::poison(const Buffer& output) const {
  if (image_)
    check(image_->poison(output.view()));
  else
    std::memset(output.view().data, 0xff, static_cast<std::size_t>(output.numel()) * size_of(output.dtype()));
}

std::string CallMemory::fetch(const Buffer& output) const {
  std::vector<std::string> faults;
  if (image_) check(image_->fetch(output.view(), faults));
  if (!output.guards_intact()) faults.emplace_back("written outside the tensor");
  return faults.empty() ? "" : faults.front();
}

std::string CallMemory::look_beside_workspace() const {
  std::vector<std::string> faults;
  if (image_)
    check(image_->look_beside_workspace(faults));
  else if (!workspace_.guards_intact())
    faults.emplace_back("workspace: written outside");
  return faults.empty() ? "" : faults.front();
}

}  // namespace fla::tools
