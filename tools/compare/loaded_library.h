// A build of the library, loaded beside others and called through its C interface alone, so that two builds can be
// timed in one process.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fla/core/status.h"
#include "fla/fla.h"
#include "tools/command.h"
#include "tools/common/cases.h"
#include "tools/common/device_image.h"

namespace fla::tools {

class LoadedLibrary {
 public:
  // The error tells what the loader said, or which function is missing: an older library than this program can drive.
  static Result<std::shared_ptr<LoadedLibrary>> open(const std::filesystem::path& path);
  ~LoadedLibrary();
  LoadedLibrary(const LoadedLibrary&) = delete;
  LoadedLibrary& operator=(const LoadedLibrary&) = delete;

  std::string info(const char* key) const;  // fla_build_info; "" when the library does not know the key
  Status error(fla_code code) const;

  struct Api {
    decltype(&::fla_build_info) build_info = nullptr;
    decltype(&::fla_last_error) last_error = nullptr;
    decltype(&::fla_context_create) context_create = nullptr;
    decltype(&::fla_context_destroy) context_destroy = nullptr;
    decltype(&::fla_call_create) call_create = nullptr;
    decltype(&::fla_call_destroy) call_destroy = nullptr;
    decltype(&::fla_call_set_tensor) set_tensor = nullptr;
    decltype(&::fla_call_set_bool) set_bool = nullptr;
    decltype(&::fla_call_set_int) set_int = nullptr;
    decltype(&::fla_call_set_double) set_double = nullptr;
    decltype(&::fla_call_output_count) output_count = nullptr;
    decltype(&::fla_call_output) output = nullptr;
    decltype(&::fla_call_bind) bind = nullptr;
    decltype(&::fla_call_workspace) workspace = nullptr;
    decltype(&::fla_call_run) run = nullptr;
    decltype(&::fla_call_backend) backend = nullptr;
  };
  const Api& api() const { return api_; }

 private:
  LoadedLibrary() = default;
  void* handle_ = nullptr;
  Api api_;
};

// A context of a loaded library.
class LoadedContext {
 public:
  // Workers are pinned to `processors`, in turn; empty: the system places them.
  LoadedContext(std::shared_ptr<LoadedLibrary> library, const CallOptions& options,
                const std::vector<int>& processors = {});
  ~LoadedContext();
  LoadedContext(const LoadedContext&) = delete;
  LoadedContext& operator=(const LoadedContext&) = delete;
  const LoadedLibrary& library() const { return *library_; }
  fla_context* get() const { return context_; }

 private:
  std::shared_ptr<LoadedLibrary> library_;
  fla_context* context_ = nullptr;
};

// One call of a case, forward or backward. The case must outlive it. Every member throws Stop with the library's words.
class LoadedCall {
 public:
  LoadedCall(const LoadedContext& ctx, const Case& c, bool backward);
  LoadedCall(LoadedCall&& other) noexcept;
  LoadedCall& operator=(LoadedCall&&) = delete;
  LoadedCall(const LoadedCall&) = delete;
  ~LoadedCall();

  struct Output {
    std::string name;
    DType dtype;
    Shape shape;
    bool operator==(const Output&) const = default;
  };
  const std::vector<Output>& outputs() const { return outputs_; }
  void bind(const std::string& output, const TensorView& t);
  // What was set and bound lies in host memory: into the image with it, and from then on the call uses the image's.
  void add_to(DeviceImage& image) const;
  void place(const DeviceImage& image);
  std::size_t workspace();
  void run(std::span<std::byte> workspace);
  std::string backend() const;

 private:
  struct Argument {
    std::string name;
    TensorView host;
    bool output;
  };
  void require(fla_code code) const;
  void give(const Argument& a, const TensorView& t);
  const LoadedLibrary* library_;
  fla_call* call_ = nullptr;
  std::vector<Output> outputs_;
  std::vector<Argument> arguments_;
};

// Where loaded calls compute, whose tensors lie in host memory: there, or in an image on an accelerator; and a
// workspace for any one of them. The calls and their tensors must outlive it.
class CallMemory {
 public:
  CallMemory(Device device, std::vector<LoadedCall*> calls);
  std::span<std::byte> workspace() const { return image_ ? image_->workspace() : workspace_.span(); }

  void take_inputs();  // as they are on the host now; the workspace becomes NaN
  void poison(const Buffer& output) const;
  // To the host; what was written beside it, or "".
  std::string fetch(const Buffer& output) const;
  std::string look_beside_workspace() const;

 private:
  std::vector<LoadedCall*> calls_;
  std::unique_ptr<DeviceImage> image_;
  Buffer workspace_;
};

}  // namespace fla::tools
