#include "tools/common/shape_text.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>

#include "tools/common/json_strict.h"

namespace fla::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kKeys[] = {"B", "T", "H", "K", "V", "D", "HQ", "HV", "M", "L", "S"};
constexpr const char* kKeyList = "B, T, H, K, V, D, HQ, HV, M, L, S";
constexpr const char* kRange = "expected an integer from 0 to 2^40, got ";
// Eight bytes an element still count in 63 bits.
constexpr std::int64_t kMaxElements = std::numeric_limits<std::int64_t>::max() / 8;

bool known(std::string_view key) { return std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys); }

std::string describe(const Json& j) {
  if (j.is_string()) return "\"" + excerpt(j.get_ref<const std::string&>()) + "\"";
  if (j.is_number() || j.is_boolean()) return j.dump();
  return j.type_name();
}

bool to_size(const Json& j, std::int64_t& out) {
  if (!j.is_number_unsigned() || j.get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxDim)) return false;
  out = j.get<std::int64_t>();
  return true;
}

// B * T * heads * width is the largest tensor that an operator takes.
bool countable(const NamedShape& s) {
  const auto largest = [&s](std::initializer_list<const char*> keys) {
    std::int64_t n = 1;
    for (const char* key : keys) {
      if (const auto it = s.dims.find(key); it != s.dims.end()) n = std::max(n, it->second);
    }
    return n;
  };
  std::int64_t n = 1;
  for (const std::int64_t f :
       {largest({"B"}), largest({"T"}), largest({"H", "HQ", "HV"}), largest({"K", "V", "D", "M", "L", "S"})}) {
    if (f > kMaxElements / n) return false;
    n *= f;
  }
  return true;
}
constexpr const char* kTooLarge = "B T H D: expected at most 2^60 elements, got more";

}  // namespace

Result<std::vector<NamedShape>> parse_custom_shapes(std::string_view json) {
  const auto bad = [](const std::string& what) { return Status(Code::InvalidArgument, "custom shapes: " + what); };
  const Result<Json> parsed = parse_json_strict<Json>(json);
  if (!parsed.ok()) return bad(parsed.status().message());
  if (!parsed->is_object()) return bad("expected an object of shapes by name, got " + describe(*parsed));
  if (parsed->empty()) return bad("expected at least one shape, got none");

  std::vector<NamedShape> shapes;
  for (const auto& [name, entry] : parsed->items()) {
    if (name.empty()) return bad("expected a name for every shape, got an empty one");
    const std::string who = "'" + excerpt(name) + "': ";
    if (!entry.is_object()) return bad(who + "expected an object of sizes, got " + describe(entry));
    NamedShape s;
    s.name = name;
    for (const auto& [key, value] : entry.items()) {
      if (key == "cu_seqlens") {
        if (!value.is_array()) return bad(who + "cu_seqlens: expected an array of integers, got " + describe(value));
        for (std::size_t i = 0; i < value.size(); ++i) {
          std::int64_t n = 0;
          if (!to_size(value[i], n)) {
            return bad(who + "cu_seqlens[" + std::to_string(i) + "]: " + kRange + describe(value[i]));
          }
          s.cu_seqlens.push_back(n);
        }
        continue;
      }
      if (!known(key)) return bad(who + "expected " + kKeyList + " or cu_seqlens, got '" + excerpt(key) + "'");
      if (std::int64_t n = 0; to_size(value, n)) {
        s.dims.emplace(key, n);
      } else {
        return bad(who + key + ": " + kRange + describe(value));
      }
    }
    if (!countable(s)) return bad(who + kTooLarge);
    shapes.push_back(std::move(s));
  }
  return shapes;
}

Result<NamedShape> parse_shape_list(std::string_view text) {
  const auto bad = [](const std::string& what) { return Status(Code::InvalidArgument, "shape: " + what); };
  NamedShape s;
  for (;;) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) return bad("expected KEY=SIZE, got '" + excerpt(item) + "'");
    const std::string key(item.substr(0, equals));
    const std::string_view digits = item.substr(equals + 1);
    if (!known(key)) return bad("expected " + std::string(kKeyList) + ", got '" + excerpt(key) + "'");
    std::int64_t n = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), n);
    if (error != std::errc{} || end != digits.data() + digits.size() || n < 0 || n > kMaxDim) {
      return bad(key + ": " + kRange + "'" + excerpt(digits) + "'");
    }
    if (!s.dims.emplace(key, n).second) return bad(key + ": expected once, got it twice");
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  if (!countable(s)) return bad(kTooLarge);
  return s;
}

}  // namespace fla::tools
