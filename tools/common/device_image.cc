#include "tools/common/device_image.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tools/gpu/device.h"

namespace fla::tools {

namespace {

constexpr std::size_t kAlign = 256;
constexpr std::size_t kGuard = 1024;           // between what lies side by side
constexpr std::size_t kWorkspaceGuard = 8192;  // after a workspace, where a wrong size is off by whole tiles
constexpr std::byte kGuardBytes[2] = {std::byte{0xf5},
                                      std::byte{0x7f}};  // a NaN in every float type, unlike the poison
constexpr std::byte kPoison{0xff};
constexpr std::size_t kMost = std::size_t{4} << 30;  // of what one tensor reaches

// Kept from image to image: an allocation takes longer than most calls.
std::unique_ptr<gpu::Memory>& kept_memory() {
  thread_local std::unique_ptr<gpu::Memory> kept;
  return kept;
}

std::pair<std::byte*, std::byte*> extent(const TensorView& t) {
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  std::int64_t lo = 0, hi = size;
  for (int i = 0; i < t.ndim; ++i) {
    const std::int64_t reach = (t.dim(i) - 1) * t.stride[static_cast<std::size_t>(i)] * size;
    (reach > 0 ? hi : lo) += reach;
  }
  return {t.as<std::byte>() + lo, t.as<std::byte>() + hi};
}

std::size_t up(std::size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

void write_guard(std::span<std::byte> image) {
  for (std::size_t i = 0; i < image.size(); ++i) image[i] = kGuardBytes[i % 2];
}
bool intact(std::span<const std::byte> image) {
  for (std::size_t i = 0; i < image.size(); ++i)
    if (image[i] != kGuardBytes[i % 2]) return false;
  return true;
}

}  // namespace

DeviceImage::DeviceImage(Device device) : device_(device) {}

DeviceImage::~DeviceImage() {
  if (memory_ != nullptr) kept_memory() = std::move(memory_);
}

void DeviceImage::add(const TensorView& host, const std::string& name, bool written) {
  if (host.numel() == 0) return;
  const auto [begin, end] = extent(host);
  for (Region& r : regions_) {  // a tensor of several calls
    if (r.begin != begin || r.end != end || r.names != name) continue;
    r.written |= written;
    return;
  }
  regions_.push_back({begin, end, written, name});
}

Status DeviceImage::lay_out() {
  std::ranges::sort(regions_, [](const Region& a, const Region& b) { return a.begin < b.begin; });
  std::vector<Region> joined;
  for (const Region& r : regions_) {
    if (joined.empty() || r.begin >= joined.back().end) {
      joined.push_back(r);
      continue;
    }
    joined.back().end = std::max(joined.back().end, r.end);
    joined.back().written |= r.written;
    joined.back().names += ", " + r.names;
  }
  regions_ = std::move(joined);
  std::size_t at = kGuard;
  for (Region& r : regions_) {
    if (r.bytes() > kMost)
      return {Code::Unsupported, r.names + ": reaches over " + std::to_string(r.bytes()) + " bytes, too many to copy"};
    r.offset = up(at) + reinterpret_cast<std::uintptr_t>(r.begin) % kAlign;  // as aligned as on the host
    at = r.offset + r.bytes() + kGuard;
  }
  tensors_ = up(at);
  laid_out_ = true;
  return {};
}

Status DeviceImage::reserve(std::size_t workspace_bytes, std::size_t workspace_offset) {
  if (!laid_out_)
    if (Status s = lay_out(); !s) return s;
  const std::size_t bytes = tensors_ + workspace_offset + workspace_bytes + kWorkspaceGuard;
  if (memory_ == nullptr) memory_ = std::move(kept_memory());
  if (memory_ == nullptr || memory_->size() < bytes + kAlign) {
    memory_.reset();
    Result<std::unique_ptr<gpu::Memory>> made = gpu::allocate(bytes + bytes / 2 + kAlign, device_.index);
    if (!made) return made.status();
    memory_ = std::move(*made);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory_->data());
  shift_ = up(address) - address;
  base_ = static_cast<std::byte*>(memory_->data()) + shift_;
  workspace_ = {base_ + tensors_ + workspace_offset, workspace_bytes};
  return {};
}

const DeviceImage::Region* DeviceImage::region_of(const TensorView& host) const {
  const std::byte* at = extent(host).first;
  const auto next = std::ranges::upper_bound(regions_, at, {}, &Region::begin);
  return next == regions_.begin() || at >= std::prev(next)->end ? nullptr : &*std::prev(next);
}

TensorView DeviceImage::there(const TensorView& host) const {
  TensorView t = host;
  t.device = device_;
  if (t.numel() == 0) return t;
  const Region* r = region_of(host);
  if (r == nullptr) return host;
  t.data = base_ + r->offset + (t.as<std::byte>() - r->begin);
  return t;
}

Status DeviceImage::upload() {
  const auto workspace = static_cast<std::size_t>(workspace_.data() - base_);
  image_.resize(workspace);
  write_guard(image_);
  for (const Region& r : regions_) std::memcpy(image_.data() + r.offset, r.begin, r.bytes());
  Status s = memory_->fill(shift_ + workspace, workspace_.size(), kPoison, {nullptr, device_.index});
  if (s) s = memory_->upload(shift_, image_.data(), image_.size());
  std::vector<std::byte> guard(kWorkspaceGuard);
  write_guard(guard);
  if (s) s = memory_->upload(shift_ + workspace + workspace_.size(), guard.data(), guard.size());
  return s;
}

Status DeviceImage::poison(const TensorView& t) {
  if (t.numel() == 0) return {};
  const Region& r = *region_of(t);
  return memory_->fill(shift_ + r.offset, r.bytes(), kPoison, {nullptr, device_.index});
}

Status DeviceImage::fetch(const TensorView& t, std::vector<std::string>& faults) {
  if (t.numel() == 0) return {};
  const Region& r = *region_of(t);
  const std::span<std::byte> image = std::span(image_).subspan(r.offset - kGuard, r.bytes() + 2 * kGuard);
  if (Status s = memory_->download(shift_ + r.offset - kGuard, image.data(), image.size()); !s) return s;
  std::memcpy(r.begin, image.data() + kGuard, r.bytes());
  if (!intact(image.first(kGuard)) || !intact(image.last(kGuard)))
    faults.push_back(r.names + ": written outside the tensor");
  return {};
}

Status DeviceImage::look_beside_workspace(std::vector<std::string>& faults) const {
  std::vector<std::byte> guard(kWorkspaceGuard);
  const auto end = static_cast<std::size_t>(workspace_.data() - base_) + workspace_.size();
  if (Status s = memory_->download(shift_ + end, guard.data(), guard.size()); !s) return s;
  if (!intact(guard))
    faults.push_back("workspace: written outside its " + std::to_string(workspace_.size()) + " bytes");
  return {};
}

Status DeviceImage::fetch(std::vector<std::string>& faults) {
  if (Status s = memory_->download(shift_, image_.data(), image_.size()); !s) return s;
  const std::span<const std::byte> image(image_);
  std::size_t clean = 0;  // where the guard begins
  std::string before = "the first tensor";
  for (const Region& r : regions_) {
    if (!intact(image.subspan(clean, r.offset - clean))) faults.push_back(before + ": written outside the tensor");
    const auto now = image.subspan(r.offset, r.bytes());
    if (r.written)
      std::memcpy(r.begin, now.data(), now.size());
    else if (std::memcmp(r.begin, now.data(), now.size()) != 0)
      faults.push_back(r.names + ": an input was written to");
    clean = r.offset + r.bytes();
    before = r.names;
  }
  if (!intact(image.subspan(clean))) faults.push_back(before + ": written outside the tensor");
  return look_beside_workspace(faults);
}

}  // namespace fla::tools
