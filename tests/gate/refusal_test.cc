// Bad input: the right code, a message that names function and argument, and nothing written.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "fla/ops/gla/gla.h"
#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

constexpr double kMark = 96.0;

using Shape = tools::Shape;

using Spoil = std::function<Status(DynamicCall&)>;

// Binds marked outputs to a good call, spoils it, and expects the refusal from whichever step makes it. `names`: texts
// the message must hold, any one of them.
void expect_refused(const Case& good, bool backward, const Spoil& spoil, const std::vector<std::string>& names,
                    Code code, const std::string& what) {
  if (backward && good.spec().backward.empty()) return;
  for (const std::string& backend : {std::string("cpu"), std::string(kReference)}) {
    const Context& ctx = context(backend);
    const Case c = good.prepared();
    Result<DynamicCall> call = backward ? c.backward_call() : c.call();
    ASSERT_TRUE(call.ok()) << c.text() << ": " << call.status().message();
    const auto outputs = call->outputs(ctx);
    ASSERT_TRUE(outputs.ok()) << c.text() << ": " << outputs.status().message();
    std::vector<Buffer> bound;
    for (const auto& o : *outputs) {
      bound.emplace_back(o.dtype, o.shape);
      tools::fill(bound.back().view(), kMark);
      ASSERT_TRUE(call->bind(o.name, bound.back().view()).ok());
    }
    Status s = spoil(*call);
    if (s.ok()) s = call->run(ctx);
    const std::string where = backend + ": " + call->spec().name + ": " + what + ": \"" + s.message() + "\"";
    EXPECT_EQ(s.code(), code) << where;
    EXPECT_TRUE(s.message().starts_with(call->spec().name + ": ")) << where;
    EXPECT_TRUE(
        std::ranges::any_of(names, [&](const std::string& n) { return s.message().find(n) != std::string::npos; }))
        << where << "\n  does not name " << names.front();
    for (const Buffer& b : bound) {
      EXPECT_TRUE(b.guards_intact()) << where;
      for (const double x : tools::values(b.view()))
        if (x != kMark) {
          ADD_FAILURE() << where << ": an output was written";
          break;
        }
    }
  }
}

void expect_refused(const Case& good, const Spoil& spoil, const std::vector<std::string>& names,
                    const std::string& what, Code code = Code::InvalidArgument) {
  for (const bool backward : passes(good.spec())) expect_refused(good, backward, spoil, names, code, what);
}

Spoil set(const std::string& name, const TensorView& t) {
  return [name, t](DynamicCall& c) { return c.set(name, t); };
}

bool is_list(std::string_view name) {
  return std::ranges::any_of(Registry::global().entries(), [&](const Registry::Entry* e) {
    return std::ranges::any_of(e->spec.args, [&](const ArgSpec& a) { return a.list() && a.name == name; });
  });
}

// As refusals name an argument: "q", "residuals[2]"; of a list as a whole, any of its tensors.
std::string arg_text(const std::string& name) {
  if (is_list(name)) return ": " + name + "[";
  const auto [list, element] = element_name(name);
  if (element < 0 || !is_list(list)) return ": " + name + ": ";
  return ": " + std::string(list) + "[" + std::to_string(element) + "]: ";
}

Case good_case(const FunctionSpec& spec) {
  Case c = make_case(spec.name, sizes(2, 6, 2, 4, 3));
  return c.takes("initial_state") ? c.with("initial_state") : c;
}

// Every argument that a size may be reported for: those after the first one that has this symbol too.
std::vector<std::string> users_of(const FunctionSpec& spec, const std::string& symbol, const std::string& changed) {
  std::vector<std::string> names = {arg_text(changed)};
  const std::string output_symbol = symbol == "B" ? "N" : symbol;
  bool first = true;
  for (const auto& a : spec.args) {
    if (std::ranges::count(a.dims, symbol) == 0 && std::ranges::count(a.dims, output_symbol) == 0) continue;
    if (first && a.name_in_files(0) == changed) {  // it defines the size, so the others disagree with it
      for (const auto& other : spec.args) names.push_back(arg_text(other.name));
      if (const Registry::Entry* backward = Registry::global().find(spec.backward); backward != nullptr)
        for (const auto& other : backward->spec.args) names.push_back(arg_text(other.name));
      break;
    }
    first = false;
  }
  return names;
}

// One key head for both query heads, where nothing else has key heads; a cache with room for another chunk.
bool legal_change(const FunctionSpec& spec, const std::string& symbol, int by) {
  const auto users =
      std::ranges::count_if(spec.args, [&](const ArgSpec& a) { return std::ranges::count(a.dims, symbol) > 0; });
  return (symbol == "H" && by < 0 && users == 1 && takes_dim(spec, "HQ")) || (symbol == "NC" && by > 0);
}

void Shapes(const Registry::Entry& e) {
  const Case c = good_case(e.spec);
  for (const auto& name : c.input_names()) {
    const ArgSpec& a = *e.spec.find_arg(name);
    const TensorView& t = c.input(name);
    // Rank: one axis less, one more.
    TensorView low = t, high = t;
    --low.ndim;
    high.ndim = t.ndim + 1;
    high.shape[static_cast<std::size_t>(t.ndim)] = a.other_dims.empty() ? 1 : 2;  // [D, 1] may be a query
    high.stride[static_cast<std::size_t>(t.ndim)] = 1;
    expect_refused(c, set(name, low), {arg_text(name)}, "rank " + std::to_string(low.ndim));
    expect_refused(c, set(name, high), {arg_text(name)}, "rank " + std::to_string(high.ndim));
    // Every size off by one, in both directions.
    for (int axis = 0; axis < t.ndim; ++axis)
      for (const int by : {-1, 1}) {
        Shape shape(t.dims().begin(), t.dims().end());
        shape[static_cast<std::size_t>(axis)] += by;
        const Buffer b(t.dtype, shape, tools::Fill::Zero);
        const std::string& symbol = a.dims[static_cast<std::size_t>(axis)];
        if (legal_change(e.spec, symbol, by)) continue;
        expect_refused(c, set(name, b.view()), users_of(e.spec, symbol, name),
                       name + " with " + symbol + (by < 0 ? " - 1" : " + 1"));
      }
    // Negative, and sizes and strides beyond 64 bits.
    for (int axis = 0; axis < t.ndim; ++axis) {
      TensorView negative = t;
      negative.shape[static_cast<std::size_t>(axis)] = -1;
      expect_refused(c, set(name, negative), {arg_text(name)}, "a negative size");
      TensorView wide = t;
      if (t.dim(axis) < 2) continue;
      wide.stride[static_cast<std::size_t>(axis)] = std::numeric_limits<std::int64_t>::max() / 2;
      expect_refused(c, set(name, wide), {arg_text(name)}, "a stride that overflows");
    }
    if (name == first_wide(e.spec)) {
      TensorView huge = t;
      huge.shape[0] = std::int64_t{1} << 40;
      huge.shape[1] = std::int64_t{1} << 40;
      expect_refused(c, set(name, huge), {arg_text(name)}, "sizes that overflow");
    }
    TensorView null = t;
    null.data = nullptr;
    expect_refused(c, set(name, null), {arg_text(name)}, "a null pointer");
  }
}

void Types(const Registry::Entry& e) {
  const Case c = good_case(e.spec);
  const std::string first = first_wide(e.spec);
  for (const auto& name : c.input_names()) {
    const ArgSpec& a = *e.spec.find_arg(name);
    const bool index = a.types == fla::Types::Index;
    for (const DType t : index ? std::vector{DType::F32, DType::BF16} : std::vector{DType::I32, DType::I64}) {
      const Buffer b = tools::cast(c.input(name), t);
      expect_refused(c, set(name, b.view()), {arg_text(name)}, std::string("type ") + fla::name_of(t));
    }
    if (a.types == fla::Types::Wide && name != first)
      for (const DType t : {DType::F16, DType::BF16, DType::F64}) {
        const Buffer b = tools::cast(c.input(name), t);
        expect_refused(c, set(name, b.view()), {arg_text(name)}, std::string("a mixture with ") + fla::name_of(t));
      }
    TensorView elsewhere = c.input(name);
    elsewhere.device = {DeviceType::Cuda, 0};
    if (&a != &e.spec.args.front()) expect_refused(c, set(name, elsewhere), {arg_text(name)}, "another device");
  }
}

void Names(const Registry::Entry& e) {
  const Case c = good_case(e.spec);
  const Buffer b(DType::F32, {1}, tools::Fill::Zero);
  expect_refused(c, set("zeta", b.view()), {arg_text("zeta")}, "an unknown argument");
  expect_refused(c, set("grad_out.zeta", b.view()), {"grad_out.zeta"}, "an unknown upstream gradient");
  expect_refused(c, set("o", b.view()), {arg_text("o")}, "an output as an input");
  for (const char* flag : {"head_first", "sclae", "use_qk_l2norm_in_kernel"})
    if (e.spec.find_flag(flag) == nullptr)
      expect_refused(
          c, [flag](DynamicCall& call) { return call.set_flag(flag, true); }, {arg_text(flag)}, "an unknown flag");
  for (const auto& name : c.input_names()) {
    if (!e.spec.find_arg(name)->required) continue;
    expect_refused(c, set(name, TensorView()), {arg_text(name)}, "a missing argument");
  }
  const auto unknown = DynamicCall::make(Registry::global(), e.spec.name + "x");
  EXPECT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), Code::InvalidArgument);
  EXPECT_NE(unknown.status().message().find(e.spec.name + "x"), std::string::npos) << unknown.status().message();
  EXPECT_NE(unknown.status().message().find("nearest: " + e.spec.name), std::string::npos)
      << unknown.status().message();
  // Another function's arguments are unknown here.
  for (const Registry::Entry* other : Registry::global().entries()) {
    if (other->spec.operation != e.spec.operation || other->spec.is_backward()) continue;
    for (const auto& a : other->spec.args)
      if (a.role == Role::Input && e.spec.find_arg(a.name) == nullptr)
        expect_refused(c, set(a.name, b.view()), {arg_text(a.name)}, "a sibling's argument");
    for (const auto& f : other->spec.flags)
      if (e.spec.find_flag(f.name) == nullptr)
        expect_refused(
            c, [&f](DynamicCall& call) { return call.set_flag(f.name, true); }, {arg_text(f.name)}, "a sibling's flag");
  }
}

void Flags(const Registry::Entry& e) {
  const Case c = good_case(e.spec);
  for (const auto& f : e.spec.flags) {
    const auto give = [&f](FlagValue v) { return [&f, v](DynamicCall& call) { return call.set_flag(f.name, v); }; };
    const auto refuse = [&](FlagValue v) {
      const std::string what = f.name + " = " + to_string(v);
      expect_refused(c, false, give(v), {arg_text(f.name)}, Code::InvalidArgument, what);
      if (f.set && !e.spec.backward.empty())
        expect_refused(c, true, give(v), {arg_text(f.name)}, Code::InvalidArgument, what);
    };
    switch (f.type) {
      case FlagSpec::Type::Bool:
        refuse(std::int64_t{1});
        refuse(0.5);
        break;
      case FlagSpec::Type::Float:
        refuse(true);
        refuse(std::numeric_limits<double>::quiet_NaN());
        refuse(std::numeric_limits<double>::infinity());
        refuse(-std::numeric_limits<double>::infinity());
        if (f.sign != FlagSpec::Sign::Any) {
          refuse(0.0);
          refuse(f.sign == FlagSpec::Sign::Positive ? -1.0 : 1.0);
        }
        break;
      case FlagSpec::Type::Int:
        refuse(true);
        refuse(1.5);
        if (f.min > -1e300) refuse(static_cast<std::int64_t>(f.min) - 1);
        if (f.max < 1e300) refuse(static_cast<std::int64_t>(f.max) + 1);
        if (f.power_of_two)
          for (const std::int64_t v : {0, -1, -64, 3, 48, 65}) refuse(v);
        break;
    }
    if (!f.retired_for.empty()) {  // accepted with one warning; beside the new name refused
      Result<DynamicCall> call = c.call();
      ASSERT_TRUE(call.ok());
      const std::size_t before = call->warnings().size();  // of a deprecated function there is one already
      ASSERT_TRUE(call->set_flag(f.name, false).ok());
      ASSERT_EQ(call->warnings().size(), before + 1);
      EXPECT_NE(call->warnings().back().find(f.name), std::string::npos);
      EXPECT_NE(call->warnings().back().find(f.retired_for), std::string::npos);
      EXPECT_FALSE(call->set_flag(f.retired_for, false).ok());
      expect_refused(
          c,
          [&f](DynamicCall& x) {
            if (Status s = x.set_flag(f.retired_for, false); !s) return s;
            return x.set_flag(f.name, false);
          },
          {arg_text(f.name), arg_text(f.retired_for)}, "both names of one flag");
    }
    if (f.required) {
      Result<DynamicCall> bare = DynamicCall::make(Registry::global(), e.spec.name);
      ASSERT_TRUE(bare.ok());
      for (const auto& other : e.spec.flags)
        if (other.required && other.name != f.name) {
          for (const auto& [name, v] : e.spec.bench_flags)
            if (name == other.name) {
              ASSERT_TRUE(bare->set_flag(name, v).ok());
            }
        }
      for (const auto& name : c.input_names()) ASSERT_TRUE(bare->set(name, c.input(name)).ok());
      const auto outputs = bare->outputs(context("cpu"));
      ASSERT_FALSE(outputs.ok());
      EXPECT_NE(outputs.status().message().find(arg_text(f.name)), std::string::npos) << outputs.status().message();
    }
  }
}

void Widths(const Registry::Entry& e) {
  for (const char* symbol : {"H", "K", "V", "D"}) {
    const std::string s = symbol;
    const ArgSpec* user = nullptr;
    for (const auto& a : e.spec.args)
      if (a.role == Role::Input && a.required && user == nullptr && std::ranges::count(a.dims, s) > 0) user = &a;
    if (user == nullptr) continue;
    const auto refuse_width = [&](std::int64_t n) {
      Sizes z = sizes(1, 3, 2, 4, 3);
      (s == "H" ? z.H : s == "K" ? z.K : s == "V" ? z.V : z.D) = n;
      if (s == "H") z.HQ = 2;
      const Result<Case> made = Case::make(Registry::global(), e.spec.name, z);
      ASSERT_TRUE(made.ok()) << made.status().message();
      const Case& c = *made;
      for (const bool backward : passes(e.spec)) {
        const Outcome o = backward ? c.run_backward(context("cpu")) : c.run(context("cpu"));
        EXPECT_EQ(o.status.code(), Code::InvalidArgument) << c.text() << ": " << symbol << " = " << n;
        EXPECT_NE(o.status.message().find(arg_text(user->name)), std::string::npos) << o.status.message();
        EXPECT_TRUE(o.status.message().starts_with(e.spec.name)) << o.status.message();
        for (const auto& [name, b] : o.tensors)
          for (const double x : tools::values(b.view())) EXPECT_TRUE(std::isnan(x));
      }
    };
    refuse_width(0);
    const auto most = e.spec.max_dim.find(s);
    if (most == e.spec.max_dim.end() || most->second == 0) continue;
    refuse_width(most->second + 1);
    Sizes z = sizes(1, 3, 1, 4, 3);
    (s == "K" ? z.K : s == "V" ? z.V : z.D) = most->second;
    expect_agrees(make_case(e.spec.name, z), "cpu");  // the limit itself is served
  }
}

void Boundaries(const Registry::Entry& e) {
  Case good = make_case(e.spec.name, packed({0, 2, 2, 6}, 2, 4, 3));
  if (good.takes("initial_state")) good = good.with("initial_state");
  const auto boundaries = [](std::vector<double> x, DType t = DType::I64) {
    Buffer b(t, {static_cast<std::int64_t>(x.size())});
    tools::assign(b.view(), x);
    return b;
  };
  const std::string cu = arg_text("cu_seqlens");
  for (const DType t : {DType::I32, DType::I64}) {
    const std::pair<std::vector<double>, const char*> bad[] = {{{1, 2, 2, 6}, "does not start at 0"},
                                                               {{-1, 2, 2, 6}, "starts below 0"},
                                                               {{0, 3, 2, 6}, "decreases"},
                                                               {{0, 2, 2, 5}, "ends before T"},
                                                               {{0, 2, 2, 7}, "ends behind T"},
                                                               {{0, 7, 7, 6}, "passes T on its way"},
                                                               {{0, -2, 2, 6}, "has a negative entry"}};
    for (const auto& [x, what] : bad) {
      const Buffer b = boundaries(x, t);
      expect_refused(good, set("cu_seqlens", b.view()), {cu}, what);
    }
  }
  const Buffer one = boundaries({0}), none = boundaries({}), real = boundaries({0, 2, 2, 6}, DType::F32);
  expect_refused(good, set("cu_seqlens", one.view()), {cu}, "has one entry");
  expect_refused(good, set("cu_seqlens", none.view()), {cu}, "has no entry");
  expect_refused(good, set("cu_seqlens", real.view()), {cu}, "has float entries");
  Buffer square(DType::I64, {2, 2}, tools::Fill::Zero);
  expect_refused(good, set("cu_seqlens", square.view()), {cu}, "has two axes");
  // B != 1.
  const Case dense = good_case(e.spec);
  const Buffer two = boundaries({0, 4, 6});
  expect_refused(dense, set("cu_seqlens", two.view()), {cu, arg_text("initial_state"), arg_text("h")},
                 "comes with B = 2");
  // A state per sequence.
  if (good.takes("initial_state")) {
    const Buffer fewer = boundaries({0, 2, 6});
    expect_refused(good, set("cu_seqlens", fewer.view()), {arg_text("initial_state")},
                   "has fewer sequences than states");
  }
  if (good.takes("cu_seqlens_cpu")) {
    const Buffer host = boundaries({0, 2, 5});
    expect_refused(good, set("cu_seqlens_cpu", host.view()), {arg_text("cu_seqlens_cpu")},
                   "a host copy of another length");
    const Buffer wrong = boundaries({0, 2, 2, 5});
    expect_refused(good, set("cu_seqlens_cpu", wrong.view()), {arg_text("cu_seqlens_cpu")},
                   "a host copy that ends before T");
    const Buffer alone = boundaries({0, 2, 6});
    expect_refused(dense, set("cu_seqlens_cpu", alone.view()), {arg_text("cu_seqlens_cpu")}, "a host copy alone");
  }
}

// What the caller gives as memory for outputs.
void Outputs(const Registry::Entry& e) {
  const Case c = good_case(e.spec).prepared();
  const Context& ctx = context("cpu");
  for (const bool backward : passes(e.spec)) {
    const auto make = [&] { return backward ? c.backward_call() : c.call(); };
    Result<DynamicCall> bare = make();
    ASSERT_TRUE(bare.ok()) << bare.status().message();
    Status s = bare->run(ctx);
    EXPECT_EQ(s.code(), Code::InvalidArgument) << "no output: " << s.message();
    EXPECT_FALSE(bare->bind("out.zeta", TensorView()).ok());
    const auto outputs = bare->outputs(ctx);
    ASSERT_TRUE(outputs.ok());
    for (const auto& bad : *outputs) {
      std::string arg = bad.name.substr(bad.name.find('.') + 1);
      if (arg.ends_with(".0") && !is_list(element_name(arg).list)) arg.resize(arg.size() - 2);
      if (backward) arg = "d" + arg;
      const auto refuse = [&](const TensorView& t, const std::string& what) {
        Result<DynamicCall> call = make();
        std::vector<Buffer> bound;
        for (const auto& o : *outputs) {
          bound.emplace_back(o.dtype, o.shape);
          tools::fill(bound.back().view(), kMark);
          ASSERT_TRUE(call->bind(o.name, o.name == bad.name ? t : bound.back().view()).ok());
        }
        const Status r = call->run(ctx);
        EXPECT_EQ(r.code(), Code::InvalidArgument) << bad.name << ": " << what << ": " << r.message();
        EXPECT_NE(r.message().find(arg_text(arg)), std::string::npos)
            << bad.name << ": " << what << ": " << r.message();
        for (const Buffer& b : bound)
          for (const double x : tools::values(b.view())) ASSERT_EQ(x, kMark) << bad.name << ": " << what;
      };
      Shape larger = bad.shape;
      ++larger.back();
      refuse(Buffer(bad.dtype, larger).view(), "a size too large");
      const Buffer other(bad.dtype == DType::F32 ? DType::BF16 : DType::F32, bad.shape), ints(DType::I32, bad.shape),
          fits(bad.dtype, bad.shape);
      refuse(other.view(), "another type");
      if (is_float(bad.dtype)) refuse(ints.view(), "an integer type");
      TensorView t = fits.view();
      t.data = nullptr;
      refuse(t, "a null pointer");
      t = fits.view();
      t.stride[static_cast<std::size_t>(t.ndim - 1)] = 0;
      if (t.dim(t.ndim - 1) > 1) refuse(t, "overlapping elements");
      t = fits.view();
      t.device = {DeviceType::Cuda, 0};
      refuse(t, "another device");
    }
    // A workspace that is too small.
    Result<DynamicCall> call = make();
    std::vector<Buffer> bound;
    for (const auto& o : *outputs) {
      bound.emplace_back(o.dtype, o.shape);
      tools::fill(bound.back().view(), kMark);
      ASSERT_TRUE(call->bind(o.name, bound.back().view()).ok());
    }
    const auto need = call->workspace_bytes(ctx);
    ASSERT_TRUE(need.ok()) << need.status().message();
    if (*need == 0) continue;
    for (const std::size_t bytes : {std::size_t{0}, *need - 1}) {
      const Buffer memory = Buffer::bytes(bytes);
      s = call->run(ctx, memory.span());
      EXPECT_EQ(s.code(), Code::OutOfMemory) << s.message();
      EXPECT_TRUE(s.message().starts_with(call->spec().name + ": workspace: ")) << s.message();
      for (const Buffer& b : bound)
        for (const double x : tools::values(b.view())) ASSERT_EQ(x, kMark);
    }
    EXPECT_TRUE(call->run(ctx).ok());  // the same call with memory enough
  }
}

const bool registered =
    for_every_function("RefusesShapes", Shapes) && for_every_function("RefusesTypes", Types) &&
    for_every_function("RefusesNames", Names) && for_every_function("RefusesFlags", Flags) &&
    for_every_function("RefusesWidths", Widths) && for_every_function("RefusesOutputs", Outputs) &&
    for_every_function("RefusesBoundaries", Boundaries, [](const FunctionSpec& s) { return takes(s, "cu_seqlens"); });

// ---- what the tables cannot say ----------------------------------------------------------------------------------

TEST(SimpleGla, RefusesBothGates) {
  for (const char* f : {"chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"}) {
    const Case c = make_case(f, sizes(2, 6, 2, 4, 3));
    const Buffer gamma(DType::F32, {2}, tools::Fill::Zero);
    expect_refused(c, set("g_gamma", gamma.view()), {arg_text("g_gamma"), arg_text("g")}, "g and g_gamma");
  }
}

TEST(LightningAttn, RefusesAPositiveGate) {
  for (const char* f : {"chunk_lightning_attn", "fused_recurrent_lightning_attn"})
    expect_refused(
        make_case(f, sizes(2, 6, 2, 4, 3)), [](DynamicCall& c) { return c.set_flag("layer_idx", std::int64_t{13}); },
        {arg_text("layer_idx")}, "layer_idx above num_layers");
}

TEST(LinearAttn, RefusesAPairWithoutNormalize) {
  for (const char* f : {"chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"}) {
    const Case c = make_case(f, sizes(2, 6, 2, 4, 3)).with("initial_state").flag("normalize", false);
    const Buffer z(DType::F32, {2, 1, 2, 4}, tools::Fill::Zero), wrong(DType::F32, {2, 2, 4}, tools::Fill::Zero);
    expect_refused(c, set("initial_state.1", z.view()), {": initial_state"}, "a pair without normalize");
    expect_refused(c.flag("normalize", true), set("initial_state.1", wrong.view()), {arg_text("initial_state.1")},
                   "z of another shape");
  }
}

TEST(Attentions, AreRefusedWithPackedSequences) {
  for (const char* f : {"parallel_simple_gla", "parallel_retention"}) {
    const Case c = make_case(f, sizes(1, 6, 2, 4, 3)).flag("output_attentions", true);
    Buffer cu(DType::I64, {3});
    tools::assign(cu.view(), std::vector<double>{0, 2, 6});
    expect_refused(c, false, set("cu_seqlens", cu.view()), {": output_attentions: "}, Code::InvalidArgument,
                   "output_attentions with cu_seqlens");
  }
}

TEST(Names, AnUnknownOperatorGetsTheNearestOnes) {
  for (const auto& [typed, meant] : {std::pair{"chunk_gal", "chunk_gla"},
                                     {"chunk_simple_gal", "chunk_simple_gla"},
                                     {"fused_recurent_hgrn", "fused_recurrent_hgrn"}}) {
    const auto c = DynamicCall::make(Registry::global(), typed);
    ASSERT_FALSE(c.ok());
    EXPECT_NE(c.status().message().find(std::string("nearest: ") + meant), std::string::npos) << c.status().message();
  }
}

// Members of a shared args struct that this function does not have.
TEST(TypedCalls, RefuseASiblingsMembers) {
  std::vector<float> q(12, 1.0F), o(12, kMark);
  const Context& ctx = context("cpu");
  GlaArgs a;
  a.q = a.k = a.v = a.g = {q.data(), {1, 3, 2, 2}};
  a.o = {o.data(), {1, 3, 2, 2}};
  EXPECT_TRUE(chunk_gla(ctx, a).ok());
  std::ranges::fill(o, static_cast<float>(kMark));
  const auto refused = [&](const GlaArgs& x, const char* name) {
    const Status s = chunk_gla(ctx, x);
    EXPECT_EQ(s.code(), Code::InvalidArgument);
    EXPECT_NE(s.message().find(std::string("chunk_gla: ") + name), std::string::npos) << s.message();
    for (const float y : o) EXPECT_EQ(y, kMark);
  };
  GlaArgs b = a;
  b.reverse = true;
  refused(b, "reverse");
  b = a;
  b.gv = a.v;
  refused(b, "gv");
  b = a;
  b.q = {};
  refused(b, "q");
}

}  // namespace
}  // namespace fla::gate
