// Calls that nobody chose: sizes, packings, types, strides, gates, flags and which inputs are there are drawn, and every
// backend agrees with the reference on them. A failing call is made smaller before it is told.
// The seed is fixed; FLA_RANDOM_SEED draws other calls of the CPU, FLA_RANDOM_CASES more or fewer of them.
#include <rapidcheck.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "tests/gate/gate.h"

namespace fla::gate {
namespace {

constexpr int kCases = 24;
constexpr std::uint64_t kSeed = 42;
// One under which the CPU's results of mild gates are within the plain limits, although a result of calls that nobody
// looked at may be a small difference of large numbers.
constexpr std::uint64_t kPlainSeed = 7;

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::strtoull(value, nullptr, 0) : otherwise;
}

// rapidcheck begins with small numbers and lets them grow; here each call is drawn from all of them.
std::int64_t number(std::int64_t least, std::int64_t most) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(least, most + 1));
}
bool coin() { return *rc::gen::arbitrary<bool>(); }
template <typename T>
T one_of(std::vector<T> list) {
  return *rc::gen::elementOf(std::move(list));
}

Sizes draw_sizes(const FunctionSpec& spec) {
  const std::int64_t H = number(1, 3), K = at_most(spec, "K", number(1, 70)), V = at_most(spec, "V", number(1, 70));
  Sizes s = sizes(number(1, 3), number(1, 100), H, K, V);
  if (takes_dim(spec, "HV") && coin()) s.HV = H * number(1, 3);
  if (!takes(spec, "cu_seqlens") || coin()) return s;
  s.cu_seqlens = {0};
  for (std::int64_t n = number(1, 4); n > 0; --n) s.cu_seqlens.push_back(s.cu_seqlens.back() + number(0, 40));
  s.B = 1;
  s.T = s.cu_seqlens.back();
  s.index = coin() ? DType::I32 : DType::I64;
  return s;
}

Layout draw_layout() {
  return one_of<Layout>({{},
                         {},
                         {.row_pad = 3},
                         {.last_stride = 2},
                         {.row_pad = 1, .last_stride = 3, .reversed = true},
                         {.reversed = true},
                         {.offset_bytes = 8}});
}

Case draw_inputs(Case c) {
  for (const ArgSpec& a : c.spec().args) {
    // Boundaries come with the sizes; a pair's second part and the gate that excludes another have tests of their own.
    if (a.role != Role::Input || a.required || a.types == Types::Index || a.name.ends_with(".1") || a.name == "g_gamma")
      continue;
    if (!coin()) continue;
    c = c.has(a.name) ? c.without(a.name) : with_input(c, a.name);
  }
  return c;
}

Case draw_flags(Case c) {
  for (const FlagSpec& f : c.spec().flags) {
    if (!f.set || number(0, 3) != 0) continue;
    switch (f.type) {
      case FlagSpec::Type::Bool: {
        const bool on = coin();
        c = on ? completed(c.flag(f.name, on), f.name) : c.flag(f.name, on);
        break;
      }
      case FlagSpec::Type::Float: c = completed(c.flag(f.name, one_of(legal_numbers(f))), f.name); break;
      case FlagSpec::Type::Int:
        if (f.name == "chunk_size") c = chunked(c, one_of<std::int64_t>({16, 32, 64}));
        break;
    }
  }
  return c;
}

// Gradients that are nothing but the rounding of what cancels, whatever the inputs: of q where an output is normalised
// and either the key has one channel (coverage_test.cc) or a sequence one token, whose output is its value; of a row of
// one channel that is brought to unit length, and so does not depend on it.
bool cancels(const Case& c) {
  const std::vector<std::int64_t>& cuts = c.sizes().cu_seqlens;
  bool alone = cuts.empty() && c.sizes().T == 1;
  for (std::size_t i = 1; i < cuts.size(); ++i) alone = alone || cuts[i] - cuts[i - 1] == 1;
  const bool narrow = c.sizes().K == 1;
  if (!c.call().ok()) return false;
  const auto on = [&](const char* flag) { return c.has_flag(flag) && c.call()->flag_on(flag); };
  if ((narrow || alone) && (on("normalize") || on("use_norm"))) return true;
  return narrow && on("use_qk_l2norm_in_kernel");
}

using Judge = std::vector<std::string> (*)(const Case&, const std::string&, const RunOptions&);

void draw(const Registry::Entry& e, const std::string& backend, std::uint64_t seed,
          const std::vector<GateRegime>& regimes, Judge judge) {
  rc::detail::TestParams params;
  params.seed = tools::stream_of(seed, e.spec.name);
  params.maxSuccess = judges_device() ? kCases : static_cast<int>(from_environment("FLA_RANDOM_CASES", kCases));
  const auto agrees = [&] {
    const DType dtype = one_of<DType>({DType::F32, DType::F32, DType::BF16, DType::F16});
    const auto regime = one_of<GateRegime>(regimes);
    const std::uint64_t contents = static_cast<std::uint64_t>(number(0, 1000));
    Case c = draw_flags(
        draw_inputs(make_case(e.spec.name, draw_sizes(e.spec), {.dtype = dtype, .seed = contents, .regime = regime})));
    for (const auto& name : c.input_names()) c = c.layout(name, draw_layout());
    const Layout outputs = draw_layout();
    if (cancels(c)) RC_DISCARD("a gradient cancels");
    // Inputs and flags that exclude each other; refusal_test.cc has those.
    if (c.run(reference()).status.code() == Code::InvalidArgument) RC_DISCARD("not legal");
    for (const auto& problem : judge(c, backend, {.outputs = outputs})) RC_FAIL(problem);
  };
  const auto result = rc::detail::checkTestable(agrees, rc::detail::TestMetadata{}, params);
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  EXPECT_TRUE(result.template is<rc::detail::SuccessResult>())
      << "FLA_RANDOM_SEED=" << seed << ", " << backend << ": " << text.str();
}

void Random(const Registry::Entry& e) {
  const std::vector<GateRegime> mild = {GateRegime::Plain, GateRegime::Zero, GateRegime::Mild};
  const std::vector<GateRegime> all = {GateRegime::Plain, GateRegime::Zero, GateRegime::Mild, GateRegime::Strong,
                                       GateRegime::Minus40};
  const std::uint64_t seed = judges_device() ? kSeed : from_environment("FLA_RANDOM_SEED", kSeed);
  for (const auto& backend : backends(e)) {
    if (!judges_device())
      draw(e, backend, kPlainSeed, mild,
           [](const Case& c, const std::string& by, const RunOptions& o) { return disagreements(c, by, o); });
    draw(e, backend, seed, all, disagreements_beyond_rounding);
  }
}

const bool registered = for_every_backend("Random", Random);

}  // namespace
}  // namespace fla::gate
