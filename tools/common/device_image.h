// A copy on an accelerator of what tensors in host memory reach, gaps between their elements included, and a workspace
// beside it: everything between guards, so that whoever made the host memory can judge both alike.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fla/core/tensor.h"
#include "tools/gpu/device.h"

namespace fla::tools {

class DeviceImage {
 public:
  explicit DeviceImage(Device device);
  ~DeviceImage();
  DeviceImage(const DeviceImage&) = delete;
  DeviceImage& operator=(const DeviceImage&) = delete;

  // Tensors that share host memory share the copy. All are added before the first reserve().
  void add(const TensorView& host, const std::string& name, bool written);
  // Addresses may change with every call.
  Status reserve(std::size_t workspace_bytes, std::size_t workspace_offset = 0);
  // The same tensor on the device; one that was not added stays where it is.
  TensorView there(const TensorView& host) const;
  std::span<std::byte> workspace() const { return workspace_; }

  Status upload();                     // all of it; the workspace becomes NaN
  Status poison(const TensorView& t);  // with NaN; one that was added, as below
  // Each waits, then copies back what calls may write: one tensor, or all. Faults name what was written and should not
  // have been: beside a tensor or the workspace, and, when all is fetched, into an input.
  Status fetch(const TensorView& t, std::vector<std::string>& faults);
  Status fetch(std::vector<std::string>& faults);
  Status look_beside_workspace(std::vector<std::string>& faults) const;

 private:
  struct Region {
    std::byte *begin, *end;  // on the host
    bool written = false;
    std::string names;
    std::size_t offset = 0;  // on the device, from the base
    std::size_t bytes() const { return static_cast<std::size_t>(end - begin); }
  };
  Status lay_out();
  const Region* region_of(const TensorView& host) const;

  Device device_;
  std::vector<Region> regions_;
  bool laid_out_ = false;
  std::size_t tensors_ = 0;  // bytes that they and their guards take
  std::vector<std::byte> image_;
  std::unique_ptr<gpu::Memory> memory_;
  std::byte* base_ = nullptr;
  std::size_t shift_ = 0;  // of the base from the memory's start
  std::span<std::byte> workspace_;
};

}  // namespace fla::tools
