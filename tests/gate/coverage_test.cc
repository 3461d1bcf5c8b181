// Every backend against the reference over the coverage axes of contract/system-gate.md and the gate regimes: outputs,
// final states and all gradients.
#include <functional>
#include <limits>
#include <optional>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

// Width 1, odd widths, more than one vector, more than one tile; K above and below V; lengths around every tile.
const std::vector<Sizes>& shapes() {
  static const std::vector<Sizes> list = {
      sizes(1, 1, 1, 1, 1),     sizes(3, 1, 2, 33, 5),    sizes(2, 15, 3, 5, 33),   sizes(1, 16, 2, 33, 5),
      sizes(1, 17, 2, 60, 100), sizes(2, 63, 2, 100, 60), sizes(1, 64, 2, 128, 64), sizes(1, 65, 2, 64, 128),
      sizes(1, 200, 2, 16, 33), sizes(1, 67, 1, 300, 5),  sizes(1, 67, 1, 5, 300),  sizes(1, 33, 1, 1, 128),
      sizes(1, 33, 1, 256, 1),  sizes(1, 100, 5, 33, 1),  sizes(1, 20, 5, 12, 150), sizes(2, 40, 9, 7, 70)};
  return list;
}

// The plain case, and with each optional input that has no generator of its own, and without each optional one.
std::vector<Case> input_variants(const Case& plain) {
  std::vector<Case> list = {plain};
  const FunctionSpec& spec = plain.spec();
  for (const auto& a : spec.args) {
    if (a.role != Role::Input || a.required || a.types == Types::Index) continue;
    if (plain.has(a.name)) {
      list.push_back(plain.without(a.name));
    } else if (a.name.ends_with(".1")) {  // a pair's second part: with the first
      const std::string first = a.name.substr(0, a.name.size() - 2);
      const Case c = plain.has_flag("normalize") ? plain.flag("normalize", true) : plain;
      list.push_back(c.with(first).with(a.name));
    } else if (a.name == "g_gamma") {
      list.push_back(plain.without("g").with(a.name));
    } else {
      list.push_back(with_input(plain, a.name));
    }
  }
  // Every optional gate alone, beside none of the others.
  const std::vector<std::string> present = gates(plain);
  for (const auto& a : spec.args)
    if (a.role == Role::Input && !a.required && a.name == "gv") {
      Case c = plain.with("gv");
      for (const auto& g : present)
        if (!spec.find_arg(g)->required) c = c.without(g);
      list.push_back(c);
    }
  return list;
}

Case with_state(const Case& c) { return with_states(c); }

void for_each_backend(const Registry::Entry& e, const std::function<void(const std::string&)>& fn) {
  for (const auto& b : backends(e)) fn(b);
}

void Shapes(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    for (const Sizes& s : shapes()) {
      if (!allows(e.spec, s)) continue;
      Case c = with_state(make_case(e.spec.name, s));
      // Normalised with a single key channel q cancels from o but for the 1e-10 of the denominator: dq is a difference
      // of equal numbers, which no F32 evaluation has a digit of.
      if (s.K == 1 && c.has_flag("normalize")) c = c.flag("normalize", false);
      expect_agrees(c, backend);
    }
    if (takes_dim(e.spec, "HQ"))
      for (const auto& [H, HQ] : {std::pair<std::int64_t, std::int64_t>{1, 3}, {2, 6}, {2, 4}, {1, 16}}) {
        Sizes s = sizes(2, 67, H, 20, 12);
        s.HQ = HQ;
        s.M = 9;
        expect_agrees(with_state(make_case(e.spec.name, s)), backend);
        if (!takes(e.spec, "cu_seqlens")) continue;
        s.cu_seqlens = {0, 1, 1, 66};
        expect_agrees(with_state(make_case(e.spec.name, s, {.regime = GateRegime::Extreme})), backend);
      }
    if (takes_dim(e.spec, "HV"))
      for (const auto& [H, HV] : {std::pair<std::int64_t, std::int64_t>{1, 2}, {2, 6}, {1, 4}, {2, 16}}) {
        Sizes s = sizes(2, 67, H, 20, 12);
        s.HV = HV;
        expect_agrees(with_state(make_case(e.spec.name, s)), backend);
        if (!takes(e.spec, "cu_seqlens")) continue;
        s.cu_seqlens = {0, 1, 1, 66};
        expect_agrees(with_state(make_case(e.spec.name, s, {.regime = GateRegime::Extreme})), backend);
      }
  });
}

void Inputs(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    for (const Case& c : input_variants(make_case(e.spec.name, sizes(2, 65, 2, 20, 33)))) {
      expect_agrees(c, backend);
      // Upstream gradients may be absent: the output's, then the state's.
      expect_agrees(c.without_upstream("final_state"), backend);
      if (takes(e.spec, "initial_state")) expect_agrees(with_state(c).without_upstream("o"), backend);
    }
    // A state in 16 bits or double is legal beside any wide type.
    for (const char* state : {"initial_state", "state"})
      if (const ArgSpec* a = e.spec.find_arg(state); a != nullptr && a->types == Types::Float)
        for (const DType t : {DType::F16, DType::BF16, DType::F64})
          expect_agrees(make_case(e.spec.name, sizes(1, 20, 2, 12, 17)).with(state).cast(state, t), backend);
  });
}

void Flags(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    const Case c = with_state(make_case(e.spec.name, sizes(1, 81, 2, 20, 33)));
    for (const FlagSpec& f : e.spec.flags) {
      if (!f.set) continue;
      switch (f.type) {
        case FlagSpec::Type::Bool:
          for (const bool v : {false, true}) {
            expect_agrees(v ? completed(c.flag(f.name, v), f.name) : c.flag(f.name, v), backend);
            if (c.has_flag("reverse") && f.name != "reverse")
              expect_agrees(c.flag("reverse", true).flag(f.name, v), backend);
          }
          break;
        case FlagSpec::Type::Float:
          for (const double v : legal_numbers(f)) expect_agrees(completed(c.flag(f.name, v), f.name), backend);
          break;
        case FlagSpec::Type::Int:
          if (f.power_of_two)
            for (const std::int64_t v : {1, 2, 16, 32, 64, 128, 4096})
              if (static_cast<double>(v) >= f.min && static_cast<double>(v) <= f.max)
                expect_agrees(c.flag(f.name, v), backend);
          break;
      }
    }
  });
}

void Regimes(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    for (const GateRegime r : tools::kGateRegimes)
      for (const Sizes& s : {sizes(1, 65, 2, 33, 20), sizes(1, 150, 1, 60, 17)}) {
        const Case c = make_case(e.spec.name, s, {.seed = 7, .regime = r});
        for (const Case& v : input_variants(with_state(c))) expect_agrees(v, backend);
        if (c.has_flag("reverse")) expect_agrees(with_state(c).flag("reverse", true), backend);
        if (c.has_flag("chunk_size")) expect_agrees(chunked(with_state(c), 16), backend);
      }
    // The regimes in turn over time: a chunk that holds no decay, then total decay, then mild again.
    Case mixed = with_state(make_case(e.spec.name, sizes(1, 150, 2, 20, 12)));
    for (const auto& g : gates(mixed)) {
      const Buffer b = tools::clone(mixed.input(g));
      const double cycle[] = {0.0, -1000.0, -0.01, -5.0, -40.0, 0.0, -316.0};
      for (std::int64_t t = 0; t < b.view().dim(1); ++t)
        tools::fill(tools::slice(b.view(), 1, t, 1), cycle[(t / 5) % 7]);
      mixed = mixed.with(g, b.view());
    }
    expect_agrees(mixed, backend);
  });
}

bool has_gate(const FunctionSpec& spec) {
  return std::ranges::any_of(spec.args, [](const ArgSpec& a) { return a.role == Role::Input && a.gen.log_gate(); });
}

void Packed(const Registry::Entry& e) {
  const std::vector<std::int64_t> sets[] = {{0, 15}, {0, 0, 16}, {0, 1, 1, 64, 65, 129, 192, 255, 271, 271}, {0, 0, 0}};
  for_each_backend(e, [&](const std::string& backend) {
    for (const auto& cu : sets)
      for (const DType index : {DType::I32, DType::I64}) {
        const Case c = make_case(e.spec.name, packed(cu, 2, 12, 17, index));
        expect_agrees(c, backend);
        if (!c.takes("initial_state")) continue;
        expect_agrees(with_state(c), backend);
        if (c.has_flag("reverse")) expect_agrees(with_state(c).flag("reverse", true), backend);
        if (c.has_flag("state_v_first")) expect_agrees(with_state(c).flag("state_v_first", true), backend);
        if (c.has_flag("normalize"))
          for (const bool v : {false, true}) expect_agrees(with_state(c).flag("normalize", v), backend);
        if (c.has_flag("chunk_size")) expect_agrees(chunked(with_state(c), 32), backend);
      }
    if (takes(e.spec, "cu_seqlens_cpu"))
      expect_agrees(make_case(e.spec.name, packed(sets[2], 2, 12, 17)).with("cu_seqlens_cpu"), backend);
    if (has_gate(e.spec))
      for (const GateRegime r : {GateRegime::Extreme, GateRegime::Minus316})
        expect_agrees(with_state(make_case(e.spec.name, packed(sets[2], 2, 12, 17), {.regime = r})), backend);
  });
}

// A gate that forgets everything, as those who pack sequences without boundaries write it.
void Masks(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    for (const double mask : {-std::numeric_limits<double>::infinity(), -1e30, -1e18}) {
      Case c = with_state(make_case(e.spec.name, sizes(2, 70, 2, 20, 17)));
      for (const auto& g : gates(c)) {
        const TensorView t = c.input(g);
        std::vector<double> x = tools::values(t);
        for (std::size_t i = 3; i < x.size(); i += 5) x[i] = mask;
        const Buffer b(t.dtype, {t.dims().begin(), t.dims().end()});
        tools::assign(b.view(), x);
        c = c.with(g, b.view());
      }
      expect_agrees(c, backend);
    }
  });
}

bool takes_packed(const FunctionSpec& spec) { return takes(spec, "cu_seqlens"); }

// An input that the call writes too, unless an output of its own is given.
bool written_in_place(const FunctionSpec& spec, const std::string& input) {
  return std::ranges::any_of(spec.args, [&](const ArgSpec& a) { return a.starts_as == input; });
}

void Strides(const Registry::Entry& e) {
  const Layout layouts[] = {{.row_pad = 3},
                            {.last_stride = 2},
                            {.row_pad = 5, .last_stride = 3, .reversed = true},
                            {.reversed = true},
                            {.offset_bytes = 8}};
  for_each_backend(e, [&](const std::string& backend) {
    const Case c = with_state(make_case(e.spec.name, sizes(2, 40, 2, 20, 33)));
    for (const Layout& l : layouts) {
      Case all = c;
      for (const auto& name : c.input_names()) {
        expect_agrees(c.layout(name, l), backend);
        all = all.layout(name, l);
      }
      expect_agrees(all, backend, {.outputs = l});
      expect_agrees(c, backend, {.outputs = l});
    }
    // Broadcast inputs: one index of an axis everywhere, by stride 0; every axis in turn, then all of them.
    for (const auto& name : c.input_names()) {
      if (written_in_place(e.spec, name) || e.spec.find_arg(name)->types == Types::Index) continue;
      const int axes = c.input(name).ndim;
      // With equal keys, or values, over time a weighted mean does not depend on the query: dq is a difference of equal
      // numbers.
      const bool cancels = c.has_flag("use_norm") && (name == "k" || name == "v");
      Case whole = c;
      for (int axis = 0; axis < axes; ++axis) {
        // Equal rows, or equal columns, are no symmetric matrix; both are.
        const bool half = e.spec.find_arg(name)->gen.kind == Gen::Kind::Moment && axis >= axes - 2;
        if (!half)
          expect_agrees(cancels && axis == 1 ? c.flag("use_norm", false).expand(name, axis) : c.expand(name, axis),
                        backend);
        whole = whole.expand(name, axis);
      }
      expect_agrees(cancels ? whole.flag("use_norm", false) : whole, backend);
    }
    if (takes(e.spec, "cu_seqlens")) {
      const Case p = with_state(make_case(e.spec.name, packed({0, 17, 17, 50}, 2, 12, 17)));
      expect_agrees(p.layout("cu_seqlens", {.last_stride = 3}), backend);
      expect_agrees(p.layout("cu_seqlens", {.reversed = true}), backend);
    }
    // 16 bits through the same paths.
    for (const DType t : {DType::BF16, DType::F16}) {
      const Case narrow = with_state(make_case(e.spec.name, sizes(2, 40, 2, 20, 33), {.dtype = t}));
      Case all = narrow;
      for (const auto& name : narrow.input_names()) all = all.layout(name, {.row_pad = 1, .last_stride = 2});
      expect_agrees(all, backend, {.outputs = {.row_pad = 3, .last_stride = 2}});
    }
  });
}

void SixteenBits(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    for (const DType t : {DType::BF16, DType::F16}) {
      for (const Sizes& s : {sizes(1, 1, 2, 33, 5), sizes(2, 65, 2, 60, 33), sizes(1, 200, 1, 128, 64)})
        expect_agrees(with_state(make_case(e.spec.name, s, {.dtype = t})), backend);
      if (has_gate(e.spec))
        for (const GateRegime r : {GateRegime::Zero, GateRegime::Strong, GateRegime::Extreme})
          expect_agrees(with_state(make_case(e.spec.name, sizes(1, 65, 2, 33, 20), {.dtype = t, .regime = r})),
                        backend);
      // Gates may be 16 bits wide too, and beside a wide type of another kind.
      for (const auto& g : gates(make_case(e.spec.name, sizes(1, 40, 2, 20, 12))))
        for (const DType gate : {DType::BF16, DType::F16, DType::F64})
          expect_agrees(make_case(e.spec.name, sizes(1, 40, 2, 20, 12), {.dtype = t}).cast(g, gate), backend);
    }
  });
}

// Longer than 8000 tokens: addresses, and sums that run for long.
void Long(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    expect_agrees(with_state(make_case(e.spec.name, sizes(1, 8200, 1, 5, 3))), backend);
  });
}

// No token at all: an empty output, the state handed through, and back.
void NoTokens(const Registry::Entry& e) {
  for_each_backend(e, [&](const std::string& backend) {
    const Case c = with_state(make_case(e.spec.name, sizes(2, 0, 2, 12, 17)));
    expect_agrees(c, backend);
    const Outcome o = c.run(context(backend));
    expect_ok(o, c.text());
    if ((!o.ok() && !refused(o)) || !c.takes("initial_state")) return;
    for (const auto& [name, t] : o.tensors)
      if (name == "out.final_state" || name == "out.final_state.0") {
        EXPECT_EQ(tools::values(t.view()), tools::values(c.input("initial_state"))) << c.text();
      }
    expect_agrees(make_case(e.spec.name, sizes(0, 5, 2, 12, 17)), backend);  // no sequence at all
  });
}

const bool registered =
    for_every_backend("Shapes", Shapes) && for_every_backend("Inputs", Inputs) && for_every_backend("Flags", Flags) &&
    for_every_backend("Regimes", Regimes, has_gate) && for_every_backend("Masks", Masks, has_gate) &&
    for_every_backend("Packed", Packed, takes_packed) && for_every_backend("Strides", Strides) &&
    for_every_backend("SixteenBits", SixteenBits) && for_every_backend("Long", Long) &&
    for_every_backend("NoTokens", NoTokens, [](const FunctionSpec& s) { return !s.max_dim.contains("T"); });

}  // namespace
}  // namespace fla::gate
