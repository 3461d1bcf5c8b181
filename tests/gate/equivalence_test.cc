// What must be equal to what: sibling functions, token by token and split runs with carried state, packed and separate
// sequences, one head and all, families that are special cases of others.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

// ---- helpers -----------------------------------------------------------------------------------------------------

// The time axis of a tensor and its rows per token, or {-1, 0}.
std::pair<int, std::int64_t> time_axis(const Case& c, const std::string& tensor) {
  const ArgSpec* a = c.spec().find_arg(tensor.substr(tensor.find('.') + 1));
  if (a == nullptr || a->dims.front() != "B") return {-1, 0};  // no argument: a state, "final_state.0"
  for (std::size_t i = 0; i < a->dims.size(); ++i)
    if (const std::int64_t rows = c.rows_of(*a, i, "T"); rows > 0) return {static_cast<int>(i), rows};
  return {-1, 0};
}

// The case under a sibling's name, or nothing where the sibling lacks one of its inputs or flags.
std::optional<Case> sibling(const Case& c, const FunctionSpec& to) {
  std::map<std::string, std::string> rename;
  for (const auto& name : c.input_names()) {
    if (takes(to, name)) {  // one token has no time axis
      const auto &theirs = to.find_arg(name)->dims, &ours = c.spec().find_arg(name)->dims;
      const auto timed = [](const std::vector<std::string>& dims) {
        return std::ranges::count(dims, "T") + std::ranges::count(dims, "TQ");
      };
      if (theirs.size() != ours.size() || timed(theirs) != timed(ours)) return std::nullopt;
      continue;
    }
    static const std::map<std::string, std::string> others = {
        {"g", "gk"}, {"gk", "g"}, {"state", "initial_state"}, {"initial_state", "state"}};
    const auto other = others.find(name);
    if (other == others.end() || !takes(to, other->second)) return std::nullopt;
    rename[name] = other->second;
  }
  for (const auto& a : to.args)
    if (a.role == Role::Input && a.required && !c.has(a.name) &&
        std::ranges::none_of(rename, [&](const auto& r) { return r.second == a.name; }))
      return std::nullopt;
  if (const auto most = to.max_dim.find("T"); most != to.max_dim.end() && c.sizes().T > most->second)
    return std::nullopt;
  if (!allows(to, c.sizes())) return std::nullopt;
  try {
    return c.as(to.name, rename);
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
}

std::vector<Case> plain_cases(const FunctionSpec& spec) {
  std::vector<Case> list = {make_case(spec.name, sizes(2, 70, 2, 20, 33)), make_case(spec.name, sizes(1, 1, 2, 5, 7))};
  if (takes(spec, "cu_seqlens")) list.push_back(make_case(spec.name, packed({0, 1, 1, 64, 65, 130}, 2, 12, 17)));
  for (std::size_t i = list.size(); i-- > 0;) {
    if (takes(spec, "initial_state")) list.push_back(list[i].with("initial_state"));
    if (spec.find_flag("normalize") != nullptr) {
      list[i] = list[i].flag("normalize", false);
      list.push_back(list[i].flag("normalize", true));
    }
  }
  if (spec.find_flag("normalize") != nullptr)
    for (Case& c : list)
      if (c.has("initial_state")) c = c.flag("normalize", false);
  return list;
}

bool has_siblings(const FunctionSpec& spec) {
  const Case c = make_case(spec.name, sizes(1, 2, 2, 5, 7));
  return std::ranges::any_of(Registry::global().entries(), [&](const Registry::Entry* e) {
    return e->spec.operation == spec.operation && !e->spec.is_backward() && e->spec.name != spec.name &&
           sibling(c, e->spec).has_value();
  });
}

void Siblings(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    int compared = 0;
    for (const Registry::Entry* other : Registry::global().entries()) {
      if (other == &e || other->spec.operation != e.spec.operation || other->spec.is_backward()) continue;
      for (Case c : plain_cases(e.spec)) {
        // Defaults of the scale may differ.
        if (c.has_flag("scale") && other->spec.find_flag("scale") != nullptr) c = c.flag("scale", 0.3);
        const std::optional<Case> s = sibling(c, other->spec);
        if (!s) continue;
        ++compared;
        const Context& ctx = context(backend);
        Outcome a = c.run(ctx), b = s->run(ctx);
        common(a, b);
        expect_close(a, b, kClose, c.text() + " = " + other->spec.name);
        if (e.spec.backward.empty() || other->spec.backward.empty()) continue;
        // Where only one of the two returns a state, no gradient comes through it.
        const bool states = e.spec.find_arg("final_state") != nullptr && other->spec.find_arg("final_state") != nullptr;
        Case ga = c, gb = *s;
        if (!states) {
          ga = ga.without_upstream("final_state");
          gb = gb.without_upstream("final_state");
        }
        Outcome da = ga.run_backward(ctx), db = gb.run_backward(ctx);
        common(da, db);
        expect_close(da, db, kClose, c.text() + " = " + other->spec.name + ", gradients");
        if (e.spec.alias_of == other->spec.name) {
          expect_same_bits(a, b, e.spec.name + " is served by " + other->spec.name);
          expect_same_bits(da, db, e.spec.name + " is served by " + other->spec.name);
        }
      }
    }
    EXPECT_GT(compared, 0) << e.spec.name << " has no sibling to compare with";
  }
}

// ---- carried state -----------------------------------------------------------------------------------------------

Case carry(Case next, const Outcome& before) {
  for (const auto& [name, b] : before.tensors) {
    if (!name.starts_with("out.final_")) continue;
    std::string input = "initial_" + name.substr(10);
    if (input.ends_with(".0")) input.resize(input.size() - 2);
    next = next.with(input, b.view());
  }
  return next;
}

// Writes a part's tensors into their place in the joined ones.
void join(const Case& c, Outcome& whole, const Outcome& part, std::int64_t begin, std::int64_t T) {
  for (const auto& [name, b] : part.tensors) {
    const auto [axis, rows] = time_axis(c, name);
    if (axis < 0) {
      whole.tensors.insert_or_assign(name, tools::clone(b.view()));
      continue;
    }
    auto it = whole.tensors.find(name);
    if (it == whole.tensors.end()) {
      auto shape = b.shape();
      shape[static_cast<std::size_t>(axis)] = rows * T;
      it = whole.tensors.emplace(name, Buffer(b.dtype(), shape)).first;
    }
    tools::assign(tools::slice(it->second.view(), axis, rows * begin, b.view().dim(axis)), tools::values(b.view()));
  }
}

// The gradient of what all tokens share is the sum over the parts.
bool is_shared(const Case& c, const std::string& tensor) {
  const ArgSpec* a = c.spec().find_arg(tensor.substr(tensor.find('.') + 1));
  return a != nullptr && std::ranges::none_of(a->dims, [](const std::string& d) { return d == "B" || d == "N"; });
}

Buffer sum(const TensorView& a, const TensorView& b) {
  std::vector<double> x = tools::values(a), y = tools::values(b);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  Buffer s(a.dtype, {a.dims().begin(), a.dims().end()});
  tools::assign(s.view(), x);
  return s;
}

std::vector<Case> state_cases(const FunctionSpec& spec) {
  std::vector<Case> list = {
      with_states(make_case(spec.name, sizes(2, 70, 2, 20, 17))),
      with_states(make_case(spec.name, sizes(1, 70, 2, 20, 17), {.regime = GateRegime::Extreme}))};
  // States at multiples of the chunk are not those of a part.
  if (spec.find_flag("return_intermediate_states") != nullptr)
    for (Case& c : list) c = c.flag("return_intermediate_states", false);
  if (spec.find_flag("normalize") != nullptr)
    for (std::size_t i = list.size(); i-- > 0;) {
      list[i] = list[i].flag("normalize", false);
      list.push_back(list[i].flag("normalize", true).with("initial_state.1"));
    }
  if (spec.find_flag("normalize") == nullptr && takes(spec, "initial_state.1"))
    for (Case& c : list) c = c.with("initial_state.1");
  if (spec.find_flag("state_v_first") != nullptr) list.push_back(list[0].flag("state_v_first", true));
  // Scores are no part of this.
  return list;
}

void StepByStep(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const Case& c : state_cases(e.spec)) {
      const std::int64_t T = c.sizes().T;
      Outcome joined;
      Case step = c.tokens(0, 1);
      for (std::int64_t t = 0; t < T; ++t) {
        const Outcome o = step.run(context(backend));
        if (!o.ok()) return expect_ok(o, c.text());
        join(c, joined, o, t, T);
        if (t + 1 < T) step = carry(c.tokens(t + 1, t + 2), o);
      }
      expect_close(c.run(context(backend)), joined, kClose, c.text() + " step by step");
    }
}

// The gradient crosses the cut through the state: the later part's dh0 is the earlier part's dht.
void Split(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const Case& plain : state_cases(e.spec)) {
      const Case c = plain.prepared();
      const std::int64_t T = c.sizes().T;
      const Context& ctx = context(backend);
      const Outcome whole = c.run(ctx), gradients = c.run_backward(ctx);
      for (const std::int64_t at :
           {std::int64_t{0}, std::int64_t{1}, std::int64_t{16}, std::int64_t{37}, std::int64_t{64}, T - 1, T}) {
        const std::string what = c.text() + " split at " + std::to_string(at);
        Case first = c.tokens(0, at);
        const Outcome o1 = first.run(ctx);
        const Case second = carry(c.tokens(at, T), o1);
        const Outcome o2 = second.run(ctx), d2 = second.run_backward(ctx);
        if (!o1.ok() || !o2.ok() || !d2.ok()) return expect_ok(o1, what), expect_ok(o2, what), expect_ok(d2, what);
        Outcome joined, joined_gradients;
        join(c, joined, o1, 0, T);
        join(c, joined, o2, at, T);
        expect_close(whole, joined, kClose, what);
        for (const auto& [name, b] : d2.tensors) {
          if (!name.starts_with("grad.initial_")) continue;
          std::string output = "final_" + name.substr(13);
          if (output.ends_with(".0")) output.resize(output.size() - 2);
          first = first.with_upstream(output, b.view());
        }
        const Outcome d1 = first.run_backward(ctx);
        if (!d1.ok()) return expect_ok(d1, what);
        join(c, joined_gradients, d2, at, T);
        join(c, joined_gradients, d1, 0, T);
        for (const auto& [name, b] : d1.tensors)
          if (is_shared(c, name)) joined_gradients.tensors.insert_or_assign(name, sum(b.view(), d2[name]));
        expect_close(gradients, joined_gradients, kClose, what + ", gradients");
      }
    }
}

// ---- parts on their own: equal bit for bit -----------------------------------------------------------------------

struct Part {
  int axis;
  std::int64_t begin, length;
};

// Every tensor of `part` equals its place in `whole`; `place` says where that is, by the tensor's argument. One that
// has no place is a sum over the parts.
template <typename Place>
void expect_part(const FunctionSpec& spec, const Outcome& whole, const Outcome& part, Place place,
                 const std::string& what) {
  if (!whole.ok() || !part.ok()) return expect_ok(whole, what), expect_ok(part, what);
  EXPECT_EQ(part.tensors.empty(), part.no_such_pass) << what;
  int compared = 0;
  for (const auto& [name, b] : part.tensors) {
    std::string arg = name.substr(name.find('.') + 1);
    if (spec.pair_state && arg.ends_with(".0")) arg.resize(arg.size() - 2);
    const ArgSpec* a = spec.find_arg(arg);
    ASSERT_NE(a, nullptr) << name;
    TensorView there = whole[name];
    const std::vector<Part> parts = place(*a);
    if (parts.empty()) continue;
    ++compared;
    for (const Part& p : parts) there = tools::slice(there, p.axis, p.begin, p.length);
    EXPECT_TRUE(tools::same_bits(there, b.view())) << what << "\n  " << name << " differs";
  }
  EXPECT_GT(compared, 0) << what;
}

std::vector<Part> at_symbol(const Case& c, const ArgSpec& a, const std::string& symbol, std::int64_t begin,
                            std::int64_t length) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < a.dims.size(); ++i)
    if (const std::int64_t rows = c.rows_of(a, i, symbol); rows > 0)
      parts.push_back({static_cast<int>(i), rows * begin, rows * length});
  return parts;
}

void Sequences(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend);
    for (Case c : plain_cases(e.spec)) {
      c = c.prepared();
      const bool is_packed = !c.sizes().cu_seqlens.empty();
      const std::int64_t N = is_packed ? static_cast<std::int64_t>(c.sizes().cu_seqlens.size()) - 1 : c.sizes().B;
      const RunOptions without_scores = {.only = {"out.o", "out.block_indices", "out.final_state", "out.final_state.0",
                                                  "out.final_state.1", "out.state_out", "out.state_pool", "out.k_tilde",
                                                  "out.r_cache"}};
      const bool has_gradients = !e.spec.backward.empty();
      const Outcome whole = c.run(ctx, without_scores), gradients = has_gradients ? c.run_backward(ctx) : Outcome();
      for (std::int64_t n = 0; n < N; ++n) {
        const Case one = c.sequence(n);
        const auto place = [&](const ArgSpec& a) {
          if (!is_packed) {
            auto parts = at_symbol(c, a, "B", n, 1);
            for (const char* symbol : {"N", "P"})
              for (const Part& p : at_symbol(c, a, symbol, n, 1)) parts.push_back(p);
            return parts;
          }
          const std::int64_t begin = c.sizes().cu_seqlens[static_cast<std::size_t>(n)];
          auto parts = at_symbol(c, a, "T", begin, one.sizes().T);
          for (const char* symbol : {"N", "P"})
            for (const Part& p : at_symbol(c, a, symbol, n, 1)) parts.push_back(p);
          return parts;
        };
        const std::string what = c.text() + ", sequence " + std::to_string(n) + " alone";
        expect_part(e.spec, whole, one.run(ctx, without_scores), place, what);
        if (has_gradients) expect_part(e.spec, gradients, one.run_backward(ctx), place, what);
      }
    }
  }
}

bool has_heads(const FunctionSpec& spec) {
  const std::string wide = first_wide(spec);
  if (wide.empty()) return false;
  const std::vector<std::string>& dims = spec.find_arg(wide)->dims;
  return std::ranges::count(dims, "H") + std::ranges::count(dims, "HQ") > 0;
}

// In these the decay is a function of the head's index, so only the first head can stand alone.
bool decay_by_index(const FunctionSpec& spec) {
  return spec.operation == "retention" || spec.operation == "lightning_attn";
}

void Heads(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend);
    Case c = make_case(e.spec.name, sizes(2, 70, 3, 20, 33));
    if (has_state(e.spec)) c = c.with("initial_state");
    c = c.prepared();
    const bool has_gradients = !e.spec.backward.empty();
    const Outcome whole = c.run(ctx), gradients = has_gradients ? c.run_backward(ctx) : Outcome();
    for (std::int64_t h = 0; h < (decay_by_index(e.spec) ? 1 : 3); ++h) {
      const auto place = [&](const ArgSpec& a) { return at_symbol(c, a, "H", h, 1); };
      const std::string what = c.text() + ", head " + std::to_string(h) + " alone";
      expect_part(e.spec, whole, c.head(h).run(ctx), place, what);
      if (has_gradients) expect_part(e.spec, gradients, c.head(h).run_backward(ctx), place, what);
    }
  }
}

// ---- flags -------------------------------------------------------------------------------------------------------

TensorView swapped(TensorView t) {
  const auto n = static_cast<std::size_t>(t.ndim);
  std::swap(t.shape[n - 1], t.shape[n - 2]);
  std::swap(t.stride[n - 1], t.stride[n - 2]);
  return t;
}

// Only the layout of states changes, no bit.
void StateLayout(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend);
    const Case c = with_states(make_case(e.spec.name, sizes(2, 70, 2, 20, 33))).prepared();
    Case s = c.flag("state_v_first", true);
    if (!e.spec.backward.empty()) s = s.with_upstream("final_state", swapped(c.upstream("final_state")));
    for (const bool backward : {false, true}) {
      const Outcome a = backward ? c.run_backward(ctx) : c.run(ctx);
      Outcome b = backward ? s.run_backward(ctx) : s.run(ctx);
      for (const char* state :
           {"out.final_state", "grad.initial_state", "out.h", "out.state_out", "out.state_pool", "out.step_states"})
        if (b.ok() && b.has(state)) b.tensors.insert_or_assign(state, tools::clone(swapped(b[state])));
      expect_same_bits(a, b, c.text() + " value-first");
    }
  }
}

// The same as flipping time of every timed input and of o.
void Reverse(const Registry::Entry& e) {
  for (const auto& backend : backends(e)) {
    const Context& ctx = context(backend);
    for (Case c : state_cases(e.spec)) {
      c = c.prepared();
      const auto flip = [&](TensorView t, int axis) {
        const auto a = static_cast<std::size_t>(axis);
        if (t.shape[a] > 0)
          t.data = static_cast<std::byte*>(t.data) +
                   (t.shape[a] - 1) * t.stride[a] * static_cast<std::int64_t>(size_of(t.dtype));
        t.stride[a] = -t.stride[a];
        return t;
      };
      Case f = c.with_upstream("o", flip(c.upstream("o"), 1));
      for (const auto& name : c.input_names())
        if (const int axis = time_axis(c, "in." + name).first; axis >= 0) f = f.with(name, flip(c.input(name), axis));
      for (const bool backward : {false, true}) {
        const Case r = f.flag("reverse", true);
        const Outcome a = backward ? c.run_backward(ctx) : c.run(ctx);
        Outcome b = backward ? r.run_backward(ctx) : r.run(ctx);
        if (!b.ok()) return expect_ok(b, r.text());
        for (auto& [name, t] : b.tensors)
          if (const int axis = time_axis(c, name).first; axis >= 0) t = tools::clone(flip(t.view(), axis));
        expect_close(a, b, kClose, r.text() + " = flipped time");
      }
    }
  }
}

// o = attn v, and no row looks ahead.
void Attentions(const Registry::Entry& e) {
  for (const auto& backend : backends(e))
    for (const GateRegime regime : {GateRegime::Plain, GateRegime::Extreme, GateRegime::Minus316}) {
      const Case c = make_case(e.spec.name, sizes(2, 70, 2, 20, 33), {.regime = regime});
      const Outcome o = c.run(context(backend));
      if (!o.ok()) return expect_ok(o, c.text());
      ASSERT_TRUE(o.has("out.attn"));
      const TensorView attn = o["out.attn"], v = c.input("v");
      Buffer product(DType::F32, o.tensors.at("out.o").shape());
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t h = 0; h < 2; ++h)
          for (std::int64_t i = 0; i < 70; ++i) {
            for (std::int64_t j = i + 1; j < 70; ++j) ASSERT_EQ(tools::load(attn.at(b, h, i, j), attn.dtype), 0.0);
            for (std::int64_t w = 0; w < 33; ++w) {
              double sum = 0.0;
              for (std::int64_t j = 0; j <= i; ++j)
                sum += tools::load(attn.at(b, h, i, j), attn.dtype) * tools::load(v.at(b, j, h, w), v.dtype);
              tools::store(product.view().at(b, i, h, w), DType::F32, sum);
            }
          }
      const auto d = tools::compare(product.view(), o["out.o"], {.R = kClose});
      EXPECT_TRUE(d.ok) << c.text() << ": o = attn v: " << d.reason;
    }
}

bool has_flag(const FunctionSpec& spec, const char* name) { return spec.find_flag(name) != nullptr; }

const bool registered =
    for_every_function("Siblings", Siblings, has_siblings) && for_every_function("StepByStep", StepByStep, has_state) &&
    for_every_function("Split", Split, has_state) && for_every_function("Sequences", Sequences) &&
    for_every_function("Heads", Heads, has_heads) &&
    for_every_function("StateLayout", StateLayout,
                       [](const FunctionSpec& s) { return has_flag(s, "state_v_first"); }) &&
    for_every_function("Reverse", Reverse, [](const FunctionSpec& s) { return has_flag(s, "reverse"); }) &&
    for_every_function("Attentions", Attentions,
                       [](const FunctionSpec& s) { return has_flag(s, "output_attentions"); });

// ---- across families ---------------------------------------------------------------------------------------------

TEST(Gla, EqualChannelsAreSimpleGla) {
  for (const GateRegime r : tools::kGateRegimes)
    for (const char* form : {"chunk", "fused_recurrent"}) {
      const std::string simple = std::string(form) + "_simple_gla", gla = std::string(form) + "_gla";
      const Case c = make_case(simple, sizes(2, 70, 2, 20, 17), {.regime = r}).with("initial_state");
      const std::string gate = gla == "chunk_gla" ? "g" : "gk";
      const Case d =
          c.without("g").flag("scale", 0.3).as("fused_recurrent_gla").with("gk", per_channel(c.input("g"), 20).view());
      const Case e = gate == "gk" ? d : d.as(gla, {{"gk", "g"}});
      expect_equal_families(c.flag("scale", 0.3), e, {{"grad.g", "compared below"}});
      // The head's gate gradient is the sum over its channels.
      const Outcome dc = c.flag("scale", 0.3).run_backward(context("cpu")), de = e.run_backward(context("cpu"));
      if (!dc.ok() || !de.ok()) return expect_ok(dc, c.text()), expect_ok(de, e.text());
      const std::vector<double> channels = tools::values(de["grad." + gate]);
      std::vector<double> sums(channels.size() / 20, 0.0);
      for (std::size_t i = 0; i < channels.size(); ++i) sums[i / 20] += channels[i];
      Buffer summed(DType::F32, dc.tensors.at("grad.g").shape());
      tools::assign(summed.view(), sums);
      const auto diff = tools::compare(dc["grad.g"], summed.view(), {.R = 1e-4});
      EXPECT_TRUE(diff.ok) << e.text() << ": sum of dg: " << diff.reason;
    }
}

// g_gamma of simple_gla with a given gate per head.
Case constant_gate(const Case& c, const std::string& function, const std::vector<double>& gamma) {
  Buffer b(DType::F32, {static_cast<std::int64_t>(gamma.size())});
  tools::assign(b.view(), gamma);
  return c.as(function).with("g_gamma", b.view());
}

TEST(Retention, IsSimpleGlaWithAConstantGate) {
  std::vector<double> gamma;
  for (int h = 0; h < 25; ++h) gamma.push_back(std::log1p(-std::exp2(-5.0 - h)));
  for (const char* form : {"chunk", "fused_chunk", "fused_recurrent"}) {
    const Case c = make_case(std::string(form) + "_retention", sizes(1, 130, 25, 6, 5)).with("initial_state");
    expect_equal_families(c, constant_gate(c, std::string(form) + "_simple_gla", gamma));
  }
}

TEST(LightningAttn, IsSimpleGlaWithAConstantGate) {
  for (const std::int64_t layer : {0, 5, 12}) {
    std::vector<double> gamma;
    for (int h = 0; h < 5; ++h) gamma.push_back(-(8.0 / 5.0) * (1.0 - static_cast<double>(layer) / 12.0) * h);
    for (const char* form : {"chunk", "fused_recurrent"}) {
      const Case c = make_case(std::string(form) + "_lightning_attn", sizes(2, 90, 5, 12, 7))
                         .with("initial_state")
                         .flag("layer_idx", layer);
      expect_agrees(c, "cpu");
      expect_equal_families(
          c,
          constant_gate(
              make_case(std::string(form) + "_simple_gla", sizes(2, 90, 5, 12, 7)).with("initial_state").without("g"),
              std::string(form) + "_simple_gla", gamma));
    }
  }
}

TEST(LinearAttn, IsGateZero) {
  for (const char* form : {"chunk", "fused_chunk", "fused_recurrent"}) {
    const std::string f = form;
    const Case c = make_case(f + "_linear_attn", sizes(2, 70, 2, 20, 17)).with("initial_state");
    const Case linear = c.flag("normalize", false);
    const Case simple = c.as(f + "_simple_gla");
    expect_equal_families(linear, simple);
    expect_equal_families(linear, simple.fill("g", 0.0), {{"grad.g", "linear attention has none"}});
    expect_equal_families(linear, c.as(f + "_gla").fill(f == "fused_recurrent" ? "gk" : "g", 0.0),
                          {{"grad.g", "as above"}});
  }
  const Case c = make_case("fused_recurrent_linear_attn", sizes(2, 70, 2, 20, 17)).with("initial_state");
  expect_equal_families(c, c.as("fused_recurrent_gla"));
}

// A zero row of keys and the sum of keys: normalised attention of a constant v is that constant.
TEST(LinearAttn, NormalisedWeightsSumToOne) {
  for (const char* f : {"chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"}) {
    const Case c = make_case(f, sizes(2, 70, 2, 20, 17)).flag("normalize", true).fill("v", 1.0);
    const Outcome o = c.run(context("cpu"));
    if (!o.ok()) return expect_ok(o, c.text());
    for (const double x : tools::values(o["out.o"])) ASSERT_NEAR(x, 1.0, 1e-5) << f;
  }
}

// A state of one number per channel: keys and queries of width one that are 1.
TEST(Hgrn, IsSimpleGlaOfWidthOne) {
  for (const char* f : {"fused_recurrent_hgrn", "chunk_hgrn"}) {
    const Case h = make_case(f, {.B = 2, .T = 150, .D = 7}).with("initial_state").prepared();
    const auto reshape = [](const TensorView& t, std::vector<std::int64_t> shape) {
      Buffer b(t.dtype, std::move(shape));
      tools::assign(b.view(), tools::values(t));
      return b;
    };
    Case g = make_case("fused_recurrent_simple_gla", sizes(2, 150, 7, 1, 1))
                 .fill("q", 1.0)
                 .fill("k", 1.0)
                 .flag("scale", 1.0);
    g = g.with("v", reshape(h.input("x"), {2, 150, 7, 1}).view()).with("g", h.input("g"));
    g = g.with("initial_state", reshape(h.input("initial_state"), {2, 7, 1, 1}).view());
    g = g.with_upstream("o", reshape(h.upstream("o"), {2, 150, 7, 1}).view());
    g = g.with_upstream("final_state", reshape(h.upstream("final_state"), {2, 7, 1, 1}).view());
    for (const bool backward : {false, true}) {
      const Outcome x = backward ? h.run_backward(context("cpu")) : h.run(context("cpu"));
      const Outcome y = backward ? g.run_backward(context("cpu")) : g.run(context("cpu"));
      if (!x.ok() || !y.ok()) return expect_ok(x, h.text()), expect_ok(y, g.text());
      for (const auto& [name, b] : x.tensors) {
        const TensorView other = y[name == "grad.x" ? "grad.v" : name];
        const auto d = tools::compare(reshape(other, b.shape()).view(), b.view(), {.R = kClose});
        EXPECT_TRUE(d.ok) << h.text() << ": " << name << ": " << d.reason;
      }
    }
  }
}

}  // namespace
}  // namespace fla::gate
