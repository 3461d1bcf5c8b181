#include "tools/common/placement.h"

#include <algorithm>

#include "tools/common/buffer.h"
#include "tools/gpu/device.h"

namespace fla::tools {

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

Placement::Placement(std::vector<DynamicCall*> calls, Device device) : calls_(std::move(calls)), image_(device) {}

Placement::~Placement() {
  for (const View& v : views_) *v.at = v.host;
}

void Placement::point_views() {
  for (const View& v : views_) *v.at = image_.there(v.host);
}

Status Placement::place(const Context& ctx, std::size_t workspace_offset) {
  for (DynamicCall* call : calls_)
    for (const ArgSpec& a : call->spec().args) {
      const std::span<TensorView> views = a.get.views(call->args());
      for (std::size_t i = 0; i < views.size(); ++i) {
        TensorView& t = views[i];
        if (!t || a.name == "cu_seqlens_cpu") continue;
        views_.push_back({&t, t});
        image_.add(
            t, a.name_in_files(i),
            a.role == Role::Output || a.role == Role::Gradient || call->spec().written_in_place(a, call->args()));
      }
    }
  if (Status s = image_.reserve(0); !s) return s;
  point_views();
  std::size_t need = 0;
  for (const DynamicCall* call : calls_) {
    const Result<std::size_t> bytes = call->workspace_bytes(ctx);
    if (!bytes) return bytes.status();
    need = std::max(need, *bytes);
  }
  if (Status s = image_.reserve(need, workspace_offset); !s) return s;
  point_views();
  return image_.upload();
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
