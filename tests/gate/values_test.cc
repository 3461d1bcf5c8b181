// ContextOptions::check_values: what a call's tensors hold, looked into before it runs, wherever they are.
#include <cmath>
#include <cstring>
#include <limits>

#include "fla/ops/gla/gla.h"
#include "tests/gate/gate.h"

namespace fla {
void register_gla_spec(Registry& r);
}

namespace fla::gate {
namespace {

// A backend on a device whose memory is the host's, some addresses away, so that only its reader reaches it.
constexpr std::uintptr_t kFar = std::uintptr_t{1} << 56;
TensorView far_away(TensorView t) {
  t.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t.data) + kFar);
  t.device = {DeviceType::Cuda, 0};
  return t;
}

class Values : public ::testing::Test {
 protected:
  Registry registry;
  int launched = 0, waited = 0;

  Values() {
    register_gla_spec(registry);
    Backend b;
    b.name = "far";
    b.priority = 1;
    b.device = DeviceType::Cuda;
    b.read = [this](void* to, const void* from, std::size_t bytes, Stream) {
      if (bytes > 0)
        std::memcpy(to, reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) - kFar), bytes);
      else
        ++waited;
      return Status();
    };
    registry.add_backend("gla", b);
    serve(kChunkGla, "far");
    serve(kGlaStep, "far");
    serve(kChunkGla, kReference);
  }

  template <typename A>
  void serve(FunctionId<A> f, const char* backend) {
    registry.add(Kernel<A>{.function = f,
                           .backend = backend,
                           .name = "count",
                           .verify = {},
                           .workspace = {},
                           .launch = [this](const A&, const CallInfo&, const LaunchInfo&) {
                             ++launched;
                             return Status();
                           }});
  }
  Context context(bool look = true) const {
    return Context({.threads = 1, .check_values = look, .registry = &registry});
  }
};

constexpr std::int64_t kT = 5, kH = 2, kD = 4;

struct ChunkCall {
  std::vector<float> x = std::vector<float>(5 * kT * kH * kD, -0.5F);
  std::vector<std::int64_t> boundaries = {0, 2, kT};
  GlaArgs args;

  explicit ChunkCall(bool on_device) {
    const auto part = [&](std::size_t i) {
      const TensorView t{x.data() + i * kT * kH * kD, {1, kT, kH, kD}};
      return on_device ? far_away(t) : t;
    };
    args.q = part(0);
    args.k = part(1);
    args.v = part(2);
    args.g = part(3);
    args.o = part(4);
    const TensorView list{boundaries.data(), {3}};
    args.cu_seqlens = on_device ? far_away(list) : list;
  }
};

TEST_F(Values, NaNInAnInputIsNamedWithItsPlace) {
  for (const bool on_device : {false, true}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
      ChunkCall c(on_device);
      c.x[2 * kT * kH * kD + (3 * kH + 1) * kD + 2] = bad;  // v[0, 3, 1, 2]
      launched = 0;
      const Status s = Function<GlaArgs>(kChunkGla)(context(), c.args);
      EXPECT_EQ(s.code(), Code::InvalidArgument);
      EXPECT_EQ(s.message(), "chunk_gla: v: the value at [0,3,1,2] is not a number");
      EXPECT_EQ(launched, 0);
      EXPECT_TRUE(Function<GlaArgs>(kChunkGla)(context(false), c.args).ok()) << "not asked to look";
    }
  }
}

TEST_F(Values, MasksAndWhatAnOutputHeldBeforeAreNoFault) {
  for (const bool on_device : {false, true}) {
    ChunkCall c(on_device);
    c.x[3 * kT * kH * kD] = -std::numeric_limits<float>::infinity();
    c.x.back() = std::numeric_limits<float>::quiet_NaN();
    launched = waited = 0;
    const Status s = Function<GlaArgs>(kChunkGla)(context(), c.args);
    EXPECT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(launched, 1);
    EXPECT_EQ(waited, on_device ? 1 : 0) << "a fault of the call is reported by the call";
  }
}

TEST_F(Values, ViewsWithGapsAndNarrowTypes) {
  // Every second element of a row from behind; the ones in between are NaN.
  std::vector<bf16> x(5 * kT * kH * kD * 2, to_bf16(std::numeric_limits<float>::quiet_NaN()));
  GlaArgs a;
  TensorView* views[] = {&a.q, &a.k, &a.v, &a.g, &a.o};
  for (std::size_t i = 0; i < 5; ++i) {
    bf16* first = x.data() + i * kT * kH * kD * 2;
    for (std::int64_t j = 0; j < kT * kH * kD; ++j) first[2 * j] = to_bf16(-1.0F);
    TensorView t{first, {1, kT, kH, kD}};
    for (std::size_t axis = 0; axis < 4; ++axis) t.stride[axis] *= 2;
    t.data = first + 2 * (kD - 1);
    t.stride[3] = -2;
    *views[i] = far_away(t);
  }
  EXPECT_TRUE(Function<GlaArgs>(kChunkGla)(context(), a).ok());
  x[(kT * kH + 1) * kD * 2] = to_bf16(std::numeric_limits<float>::quiet_NaN());  // the last channel of k[0, 0, 1]
  const Status s = Function<GlaArgs>(kChunkGla)(context(), a);
  EXPECT_EQ(s.message(), "chunk_gla: k: the value at [0,0,1,3] is not a number");
}

TEST_F(Values, BoundariesOnADevice) {
  ChunkCall c(true);
  c.boundaries = {0, 4, kT - 1};
  c.args.cu_seqlens = far_away({c.boundaries.data(), {3}});
  EXPECT_TRUE(Function<GlaArgs>(kChunkGla)(context(false), c.args).ok()) << "not asked to look";
  const Status s = Function<GlaArgs>(kChunkGla)(context(), c.args);
  EXPECT_EQ(s.code(), Code::InvalidArgument);
  EXPECT_EQ(s.message(), "chunk_gla: cu_seqlens: must end at T = 5, ends at 4");
}

TEST_F(Values, SlotsOnADevice) {
  std::vector<float> x(4 * 2 * kH * kD, -0.5F), pool(3 * kH * kD * kD, std::numeric_limits<float>::quiet_NaN()), o(x);
  std::vector<std::int32_t> slots = {2, 3};
  GlaStepArgs a;
  TensorView* views[] = {&a.q, &a.k, &a.v, &a.gk};
  for (std::size_t i = 0; i < 4; ++i) *views[i] = far_away({x.data() + i * 2 * kH * kD, {2, 1, kH, kD}});
  a.o = far_away({o.data(), {2, 1, kH, kD}});
  a.state = far_away({pool.data(), {3, kH, kD, kD}});
  a.state_indices = far_away({slots.data(), {2}});
  const Status s = Function<GlaStepArgs>(kGlaStep)(context(), a);
  EXPECT_EQ(s.code(), Code::InvalidArgument);
  EXPECT_NE(s.message().find("state_indices"), std::string::npos) << s.message();
  EXPECT_NE(s.message().find('3'), std::string::npos) << s.message();
  slots = {2, -1};
  EXPECT_TRUE(Function<GlaStepArgs>(kGlaStep)(context(), a).ok()) << "unused slots may hold anything";
  x[kH * kD] = std::numeric_limits<float>::quiet_NaN();  // q of sequence 1
  EXPECT_TRUE(Function<GlaStepArgs>(kGlaStep)(context(), a).ok()) << "and so may the inputs of padding";
  slots = {-1, 2};
  EXPECT_EQ(Function<GlaStepArgs>(kGlaStep)(context(), a).message(),
            "gla_step: q: the value at [1,0,0,0] is not a number");
}

// Every input and upstream gradient of every function: a NaN or an infinity is refused by name and place, and so is a
// log gate above 0. A mask of -infinity is a log gate, and a raw gate may be anything but no number.
const Context& looking() {
  static const Context ctx({.threads = 1, .check_values = true});
  return ctx;
}

void expect_refused(const Outcome& o, const std::string& name, const std::string& at, const std::string& fault,
                    const std::string& what) {
  EXPECT_EQ(o.status.code(), Code::InvalidArgument) << what;
  EXPECT_NE(o.status.message().find(": " + name + ": the value at " + at + " is " + fault), std::string::npos)
      << what << ": " << o.status.message();
}

void CheckedValues(const Registry::Entry& e) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  const auto last_is = [](const TensorView& t, double value) {
    std::vector<double> x = tools::values(t);
    x.back() = value;
    Buffer b = tools::clone(t);
    tools::assign(b.view(), x);
    return b;
  };
  const auto last_of = [](const TensorView& t) {
    std::vector<std::int64_t> at;
    for (const std::int64_t n : t.dims()) at.push_back(n - 1);
    return shape_string(at);
  };
  const Case plain = make_case(e.spec.name, sizes(1, 5, 2, 4, 4));
  const Outcome sound = plain.run(looking());
  EXPECT_TRUE(sound.ok()) << plain.text() << ": " << sound.problem();
  for (const auto& a : e.spec.args) {
    if (a.role != Role::Input || a.types == Types::Index || a.dims.front() == "P") continue;
    Case c = plain;
    if (a.name == "g_gamma" && c.has("g")) c = c.without("g");
    if (a.name.ends_with(".1")) {  // a pair's second part: with the first
      if (c.has_flag("normalize")) c = c.flag("normalize", true);
      c = c.with(a.name.substr(0, a.name.size() - 2)).with(a.name);
    }
    if (!a.list() && !c.has(a.name)) c = with_input(c, a.name);
    const bool raw = a.name == "g" && c.has_flag("use_gate_in_kernel") && c.call()->flag_on("use_gate_in_kernel");
    const bool gate = a.gen.log_gate() || (a.gen.kind == Gen::Kind::None && a.name.starts_with('g'));
    const auto last = static_cast<std::size_t>(std::max<std::int64_t>(c.sizes().L, 1)) - 1;  // of a list's tensors
    const std::string name = a.name_in_files(last), refused_as = a.name_of(last);
    const TensorView t = c.input(name);
    const std::string at = last_of(t);
    const auto run = [&](double value) { return c.with(name, last_is(t, value).view()).run(looking()); };
    expect_refused(run(kNaN), refused_as, at, "not a number", c.text());
    if (raw) continue;
    expect_refused(run(kInfinity), refused_as, at, "infinite", c.text());
    if (gate)
      EXPECT_TRUE(run(-kInfinity).status.ok()) << c.text() << ": " << a.name;
    else
      expect_refused(run(-kInfinity), refused_as, at, "infinite", c.text());
    if (gate) expect_refused(run(0.5), refused_as, at, "0.5; a log gate is at most 0", c.text());
  }
  if (e.spec.find_flag("use_gate_in_kernel") != nullptr) {
    const Case c = completed(plain.flag("use_gate_in_kernel", true), "use_gate_in_kernel");
    for (const double value : {0.5, kInfinity, -kInfinity}) {
      const Outcome o = c.with("g", last_is(c.input("g"), value).view()).run(looking());
      EXPECT_TRUE(o.status.ok()) << c.text() << ": " << o.problem();
    }
    expect_refused(c.with("g", last_is(c.input("g"), kNaN).view()).run(looking()), "g", last_of(c.input("g")),
                   "not a number", c.text());
  }
  if (e.spec.backward.empty()) return;
  const Case up = plain.prepared();
  for (const auto& output : up.upstream_names()) {
    const TensorView t = up.upstream(output);
    for (const double value : {kNaN, kInfinity, -kInfinity}) {
      const Outcome o = up.with_upstream(output, last_is(t, value).view()).run_backward(looking());
      EXPECT_EQ(o.status.code(), Code::InvalidArgument) << up.text() << ": " << output;
      const std::string place = "the value at " + last_of(t) + (std::isnan(value) ? " is not a" : " is infinite");
      EXPECT_NE(o.status.message().find(place), std::string::npos) << output << ": " << o.status.message();
    }
  }
}

const bool registered = for_every_function("CheckedValues", CheckedValues);

}  // namespace
}  // namespace fla::gate
