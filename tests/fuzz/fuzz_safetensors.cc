// Any bytes as a safetensors file: an error or a file whose every tensor can be read.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "tools/common/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fla;
  const auto file = tools::SafeTensorsFile::parse(std::as_bytes(std::span(data, size)), "fuzz");
  if (!file.ok()) {
    if (file.status().message().empty()) std::abort();
    return 0;
  }
  volatile unsigned sum = 0;
  for (const auto& [name, t] : (*file)->tensors()) {
    if (!(*file)->tensor(name).ok() || !t.contiguous()) std::abort();
    if (reinterpret_cast<std::uintptr_t>(t.data) % size_of(t.dtype) != 0) std::abort();
    const auto bytes = static_cast<std::size_t>(t.numel()) * size_of(t.dtype);
    for (std::size_t i = 0; i < bytes; ++i) sum = sum + static_cast<unsigned>(static_cast<const std::byte*>(t.data)[i]);
  }
  for (const auto& [name, dtype] : (*file)->unsupported()) {
    if ((*file)->tensor(name).ok()) std::abort();
  }
  return 0;
}
