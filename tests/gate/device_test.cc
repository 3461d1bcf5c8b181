// Calls on tensors of a GPU, where there need be none: nothing may look into them.
#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

// The call with every tensor at an address on the device that the host cannot read.
DynamicCall on_device(const Case& c, bool backward) {
  Result<DynamicCall> call = backward ? c.backward_call() : c.call();
  EXPECT_TRUE(call.ok()) << call.status().message();
  const Context ctx({.threads = 1});
  std::vector<std::pair<std::string, TensorView>> outputs;
  const auto made = call->outputs(ctx);
  EXPECT_TRUE(made.ok()) << made.status().message();
  std::int64_t at = 1 << 12;  // apart: outputs may not overlap
  const auto far_away = [&](TensorView t) {
    t.data = reinterpret_cast<void*>(at);
    t.device = {DeviceType::Cuda, 0};
    at += std::int64_t{1} << 24;
    return t;
  };
  for (const auto& o : *made) EXPECT_TRUE(call->bind(o.name, far_away({nullptr, o.dtype, o.shape})).ok());
  for (const ArgSpec& a : call->spec().args) {
    for (TensorView& t : a.get.views(call->args()))
      if (t && t.device.type == DeviceType::Cpu && a.name != "cu_seqlens_cpu") t = far_away(t);
  }
  return *call;
}

void OnDevice(const Registry::Entry& e) {
  std::vector<Case> cases = {make_case(e.spec.name, sizes(2, 5, 2, 8, 8))};
  if (takes(e.spec, "cu_seqlens")) cases.push_back(make_case(e.spec.name, packed({0, 2, 5}, 2, 8, 8)));
  for (const Case& plain : cases) {
    const Case c = plain.prepared();
    for (const bool backward : passes(e.spec)) {
      const DynamicCall call = on_device(c, backward);
      const Context ctx({.threads = 1});
      const Result<Route> route = call.explain(ctx);
      ASSERT_TRUE(route.ok()) << c.text() << ": " << route.status().message();
      EXPECT_TRUE(route->chosen.empty() || route->chosen == "cuda") << c.text() << ": " << route->chosen;
      ASSERT_NE(route->reason("cpu"), nullptr);
      EXPECT_EQ(*route->reason("cpu"), "serves cpu tensors, these are on cuda");
      EXPECT_EQ(*route->reason(kReference), "serves cpu tensors only");
      if (!route->chosen.empty()) {
        EXPECT_FALSE(route->plan.empty());
        continue;
      }
      const Status s = call.run(ctx);
      EXPECT_EQ(s.code(), Code::Unsupported) << c.text();
      EXPECT_NE(s.message().find("\n  cuda: "), std::string::npos) << s.message();
    }
  }
}

TEST(Device, AStreamBelongsToTheTensorsDevice) {
  int stream = 0;
  const Context ctx({.threads = 1, .stream = {&stream, 1}});
  const DynamicCall call = on_device(make_case("chunk_gla", sizes(1, 5, 1, 8, 8)), false);
  const Status s = call.run(ctx);
  EXPECT_EQ(s.code(), Code::InvalidArgument);
  EXPECT_EQ(s.message(), "chunk_gla: stream: expected one of device 0, where the tensors are, got one of device 1");
}

TEST(Device, HostBoundariesTellTheNumberOfChunks) {
  const Case c = make_case("chunk_kda", packed({0, 2, 5}, 2, 8, 8)).flag("return_intermediate_states", true).prepared();
  Result<DynamicCall> call = c.call();
  ASSERT_TRUE(call.ok()) << call.status().message();
  for (const ArgSpec& a : call->spec().args) {
    for (TensorView& t : a.get.views(call->args()))
      if (t) t.device = {DeviceType::Cuda, 0};
  }
  const Context ctx({.threads = 1});
  const auto chunks = [&]() -> std::int64_t {
    const auto made = call->outputs(ctx);
    EXPECT_TRUE(made.ok()) << made.status().message();
    for (const auto& o : *made) {
      if (o.name == "out.h") return o.shape[1];
    }
    return 0;
  };
  EXPECT_EQ(chunks(), -1);
  const std::int64_t boundaries[] = {0, 2, 5};
  ASSERT_TRUE(call->set("cu_seqlens_cpu", TensorView(boundaries, {3})).ok());
  EXPECT_EQ(chunks(), 2);
}

const bool registered = for_every_function("OnDevice", OnDevice);

}  // namespace
}  // namespace fla::gate
