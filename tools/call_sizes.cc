#include "tools/call_sizes.h"

#include <algorithm>

#include "tools/command.h"

namespace fla::tools {

bool uses(const FunctionSpec& spec, const std::string& symbol) {
  const auto has = [&](const std::string& dim) {
    const std::vector<std::string> factors = split(dim, '*');
    return std::find(factors.begin(), factors.end(), symbol) != factors.end();
  };
  return std::any_of(spec.args.begin(), spec.args.end(), [&](const ArgSpec& a) {
    return a.count == symbol || std::any_of(a.dims.begin(), a.dims.end(), has);
  });
}

Sizes sizes_for(const FunctionSpec& spec, const NamedShape& shape) {
  const std::string who = shape.name.empty() ? spec.name + ": shape: " : spec.name + ": shape '" + shape.name + "': ";
  const auto given = [&](const char* key) -> std::int64_t {
    const auto it = shape.dims.find(key);
    return it == shape.dims.end() ? -1 : it->second;
  };
  const auto need = [&](const char* key, std::int64_t value, const char* other = "") {
    if (value < 0) refuse("{}{}: needed{}, but not given", who, key, other);
    return value;
  };
  Sizes s;
  s.B = std::max<std::int64_t>(given("B"), -1);
  if (s.B < 0) s.B = 1;
  s.cu_seqlens = shape.cu_seqlens;
  s.T = given("T");
  if (!s.cu_seqlens.empty()) {
    if (spec.find_arg("cu_seqlens") == nullptr) refuse("{}cu_seqlens: this function takes no packed sequences", who);
    if (s.B != 1) refuse("{}cu_seqlens: packed sequences need B = 1, got B = {}", who, s.B);
    if (s.cu_seqlens.size() < 2 || s.cu_seqlens.front() != 0 ||
        !std::is_sorted(s.cu_seqlens.begin(), s.cu_seqlens.end()))
      refuse("{}cu_seqlens: expected 0 and then ends that do not decrease, got {}", who, shape_string(s.cu_seqlens));
    if (s.T >= 0 && s.T != s.cu_seqlens.back())
      refuse("{}cu_seqlens: must end at T = {}, ends at {}", who, s.T, s.cu_seqlens.back());
    s.T = s.cu_seqlens.back();
  }
  need("T", s.T);
  const std::int64_t D = given("D");
  if (uses(spec, "H")) s.H = need("H", given("H"));
  if (uses(spec, "HV") && given("HV") >= 0) {
    s.HV = need("HV", given("HV"));
    if (s.HV == 0 || s.H == 0 || s.HV % s.H != 0) refuse("{}HV: expected a multiple of H = {}, got {}", who, s.H, s.HV);
  }
  if (uses(spec, "HQ") && given("HQ") >= 0) {
    s.HQ = need("HQ", given("HQ"));
    if (s.HQ == 0 || s.H == 0 || s.HQ % s.H != 0) refuse("{}HQ: expected a multiple of H = {}, got {}", who, s.H, s.HQ);
  }
  if (uses(spec, "M")) s.M = given("M") >= 0 ? given("M") : 64;
  if (uses(spec, "L") && given("L") >= 0) s.L = given("L");
  if (given("L") == 0) refuse("{}L: expected at least 1, got 0", who);
  if (const auto most = spec.max_dim.find("T"); most != spec.max_dim.end() && s.T > most->second)
    refuse("{}T: expected 1 to {}, got {}", who, most->second, s.T);
  if (uses(spec, "K")) s.K = need("K", given("K") >= 0 ? given("K") : D, " (or D)");
  if (uses(spec, "V")) s.V = need("V", given("V") >= 0 ? given("V") : D, " (or D)");
  if (uses(spec, "D")) s.D = need("D", D) * (given("H") >= 0 && !uses(spec, "H") ? given("H") : 1);
  for (const char* key : {"HQ", "HV", "M", "L", "S"}) {
    const bool same_heads = key[0] == 'H' && given(key) == s.H;
    if (given(key) >= 0 && !uses(spec, key) && !same_heads) refuse("{}{}: this function has no such size", who, key);
  }
  return completed(std::move(s), spec);
}

}  // namespace fla::tools
