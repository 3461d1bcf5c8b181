#include "tools/common/placement.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tools/common/buffer.h"
#include "tools/common/gpu.h"

namespace fla::tools {

namespace {

constexpr std::size_t kAlign = 256;
constexpr std::size_t kGuard = 1024;           // between what lies side by side
constexpr std::size_t kWorkspaceGuard = 8192;  // after a workspace, where a wrong size is off by whole tiles
constexpr std::byte kGuardBytes[2] = {std::byte{0xf5},
                                      std::byte{0x7f}};  // a NaN in every float type, unlike the poison
constexpr std::byte kPoison{0xff};
constexpr std::size_t kMost = std::size_t{4} << 30;  // of what one tensor reaches

// Kept from call to call: an allocation takes longer than most calls.
std::unique_ptr<cuda::Memory>& kept_memory() {
  thread_local std::unique_ptr<cuda::Memory> kept;
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

// Of image[begin, end).
bool intact(std::span<const std::byte> image, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i)
    if (image[i] != kGuardBytes[i % 2]) return false;
  return true;
}

}  // namespace

Device device_of(const Context& ctx) {
  const std::string& name = ctx.options().backend;
  for (const Registry::Entry* e : ctx.registry().entries())
    for (const auto& c : e->candidates)
      if (c.backend->name == name) return {c.backend->device, 0};
  return {};
}

std::string device_problem(Device device) {
  return device.type == DeviceType::Cpu ? "" : gpu::device_info(device.index).status().message();
}

Placement::Placement(std::vector<DynamicCall*> calls, Device device) : calls_(std::move(calls)), device_(device) {}

Placement::~Placement() {
  restore();
  if (memory_ != nullptr) kept_memory() = std::move(memory_);
}

void Placement::restore() {
  for (View& v : views_) *v.at = v.host;
  views_.clear();
}

void Placement::point_views() {
  for (View& v : views_) {
    TensorView t = v.host;
    t.device = device_;
    if (t.numel() > 0) {
      const Region& r = regions_[v.region];
      t.data = base_ + r.offset + (t.as<std::byte>() - r.begin);
    }
    *v.at = t;
  }
}

Status Placement::reserve(std::size_t bytes) {
  if (memory_ == nullptr) memory_ = std::move(kept_memory());
  if (memory_ == nullptr || memory_->size() < bytes + kAlign) {
    memory_.reset();
    Result<std::unique_ptr<cuda::Memory>> made = gpu::allocate(bytes + bytes / 2 + kAlign, device_.index);
    if (!made) return made.status();
    memory_ = std::move(*made);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory_->data());
  shift_ = up(address) - address;
  base_ = static_cast<std::byte*>(memory_->data()) + shift_;
  point_views();
  return {};
}

Status Placement::place(const Context& ctx, std::size_t workspace_offset) {
  for (DynamicCall* call : calls_)
    for (const ArgSpec& a : call->spec().args) {
      TensorView& t = a.get(call->args());
      if (!t || a.name == "cu_seqlens_cpu") continue;
      const bool written =
          a.role == Role::Output || a.role == Role::Gradient || call->spec().written_in_place(a, call->args());
      views_.push_back({&t, t, a.name_in_files(), written});
    }
  std::vector<View*> order;
  for (View& v : views_)
    if (v.host.numel() > 0) order.push_back(&v);
  std::ranges::sort(order, [](const View* a, const View* b) { return extent(a->host).first < extent(b->host).first; });
  for (View* v : order) {
    const auto [begin, end] = extent(v->host);
    if (regions_.empty() || begin >= regions_.back().end) regions_.push_back({begin, begin});
    Region& r = regions_.back();
    r.end = std::max(r.end, end);
    r.written |= v->written;
    r.names += (r.names.empty() ? "" : ", ") + v->name;
    v->region = regions_.size() - 1;
  }
  std::size_t at = kGuard;
  for (Region& r : regions_) {
    const auto bytes = static_cast<std::size_t>(r.end - r.begin);
    if (bytes > kMost)
      return {Code::Unsupported, r.names + ": reaches over " + std::to_string(bytes) + " bytes, too many to copy"};
    r.offset = up(at) + reinterpret_cast<std::uintptr_t>(r.begin) % kAlign;  // as aligned as on the host
    at = r.offset + bytes + kGuard;
  }
  if (Status s = reserve(at); !s) return s;
  std::size_t need = 0;
  for (const DynamicCall* call : calls_) {
    const Result<std::size_t> bytes = call->workspace_bytes(ctx);
    if (!bytes) return bytes.status();
    need = std::max(need, *bytes);
  }
  const std::size_t workspace = up(at) + workspace_offset;
  used_ = workspace + need + kWorkspaceGuard;
  if (Status s = reserve(used_); !s) return s;
  workspace_ = {base_ + workspace, need};

  image_.resize(shift_ + used_);
  for (std::size_t i = 0; i < used_; ++i) image_[shift_ + i] = kGuardBytes[i % 2];
  for (const Region& r : regions_) std::copy(r.begin, r.end, image_.begin() + shift_ + r.offset);
  std::fill_n(image_.begin() + shift_ + workspace, need, kPoison);
  return memory_->upload(image_.data(), image_.size());
}

Status Placement::fetch(std::vector<std::string>& faults) {
  if (Status s = memory_->download(image_.data(), image_.size()); !s) return s;
  const std::span<const std::byte> image(image_.data() + shift_, used_);
  std::size_t clean = 0;  // where the guard begins
  std::string before = "the first tensor";
  for (const Region& r : regions_) {
    const auto bytes = static_cast<std::size_t>(r.end - r.begin);
    if (!intact(image, clean, r.offset)) faults.push_back(before + ": written outside the tensor");
    const auto now = image.subspan(r.offset, bytes);
    if (r.written)
      std::memcpy(r.begin, now.data(), bytes);
    else if (std::memcmp(r.begin, now.data(), bytes) != 0)
      faults.push_back(r.names + ": an input was written to");
    clean = r.offset + bytes;
    before = r.names;
  }
  const auto workspace = static_cast<std::size_t>(workspace_.data() - base_);
  if (!intact(image, clean, workspace)) faults.push_back(before + ": written outside the tensor");
  if (!intact(image, workspace + workspace_.size(), image.size()))
    faults.push_back("workspace: written outside its " + std::to_string(workspace_.size()) + " bytes");
  return {};
}

namespace {

Executed execute_on_cpu(const Context& ctx, const DynamicCall& call, std::size_t workspace_offset) {
  Executed x;
  const Result<std::size_t> need = call.workspace_bytes(ctx);
  if (!need) {
    x.status = need.status();
    return x;
  }
  x.workspace_bytes = *need;
  const Buffer workspace = Buffer::bytes(*need, workspace_offset);
  x.status = call.run(ctx, workspace.span());
  if (x.status) x.route = last_route();
  if (!workspace.guards_intact())
    x.faults.push_back("workspace: written outside its " + std::to_string(*need) + " bytes");
  return x;
}

}  // namespace

Executed execute(const Context& ctx, DynamicCall& call, Device device, std::size_t workspace_offset) {
  if (device.type == DeviceType::Cpu) return execute_on_cpu(ctx, call, workspace_offset);
  Executed x;
  Placement placement({&call}, device);
  if (x.status = placement.place(ctx, workspace_offset); !x.status) return x;
  x.workspace_bytes = placement.workspace().size();
  x.status = call.run(ctx, placement.workspace());
  if (!x.status) return x;
  x.route = last_route();
  x.status = placement.fetch(x.faults);
  return x;
}

}  // namespace fla::tools
