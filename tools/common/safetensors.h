// Reading and writing of .safetensors files: 8 bytes of header length, a JSON header, raw little-endian data.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fla/core/status.h"
#include "fla/core/tensor.h"

namespace fla::tools {

// The file is mapped, not read, so one larger than memory is fine, and so is looking at its header only. It must not
// shrink while the object lives. Views are read-only: writing through one is a crash. They live as long as the object.
class SafeTensorsFile {
 public:
  static Result<std::shared_ptr<SafeTensorsFile>> open(const std::filesystem::path& path);
  // Of a file's bytes, which must outlive the result. `name` stands for the file in messages.
  static Result<std::shared_ptr<SafeTensorsFile>> parse(std::span<const std::byte> bytes, const std::string& name);

  ~SafeTensorsFile();
  SafeTensorsFile(const SafeTensorsFile&) = delete;
  SafeTensorsFile& operator=(const SafeTensorsFile&) = delete;

  const std::string& name() const { return name_; }
  // Tensors that the library has a type for. Data that lies misaligned in the file has been copied to aligned memory.
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // The others, by the type that the file gives them ("U8", "BOOL", ...).
  const std::map<std::string, std::string, std::less<>>& unsupported() const { return unsupported_; }
  // The error names the file and says whether there is no such tensor or no such type.
  Result<TensorView> tensor(std::string_view tensor_name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafeTensorsFile() = default;
  Status load(std::span<const std::byte> bytes);
  Status error(const std::string& what) const;
  Status error(std::string_view tensor_name, const std::string& what) const;

  std::string name_;
  std::span<std::byte> mapping_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
  std::map<std::string, TensorView, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> unsupported_;
  std::map<std::string, std::string> metadata_;
};

// The file that writing to `path` writes: where links lead, whether there is a file at their end or not.
Result<std::filesystem::path> write_target(const std::filesystem::path& path);

// Host tensors only; strided views are written contiguously. The file appears under its name when it is complete: a
// write that fails leaves what was there before.
Status write_safetensors(const std::filesystem::path& path,
                         const std::vector<std::pair<std::string, TensorView>>& tensors,
                         const std::map<std::string, std::string>& metadata = {});

}  // namespace fla::tools
