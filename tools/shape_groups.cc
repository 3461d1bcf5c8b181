#include "tools/shape_groups.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>

#include "tools/command.h"

namespace fla::tools {
namespace {

NamedShape dense(std::int64_t B, std::int64_t T, std::int64_t H, std::int64_t D) {
  return {fmt::format("B{}_T{}_H{}_D{}", B, T, H, D), {{"B", B}, {"T", T}, {"H", H}, {"D", D}}, {}};
}

NamedShape packed(const std::string& set, const std::vector<std::int64_t>& cu_seqlens, std::int64_t D) {
  const std::int64_t T = cu_seqlens.back();
  return {fmt::format("{}_T{}_H16_D{}", set, T, D), {{"B", 1}, {"T", T}, {"H", 16}, {"D", D}}, cu_seqlens};
}

// Eight equal sequences, and lengths as training data has them.
const std::vector<std::int64_t> kEven = {0, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096};
const std::vector<std::int64_t> kRagged = {0, 15, 100, 300, 1200, 2000, 4096};

std::vector<std::int64_t> varlen_set(const std::string& text) {
  if (text == "even") return kEven;
  if (text == "ragged") return kRagged;
  std::vector<std::int64_t> list;
  for (const auto& word : split(text, ',')) {
    std::int64_t i = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), i);
    if (error != std::errc() || end != word.data() + word.size())
      refuse("--varlen: expected even, ragged or boundaries such as 0,20,64, got '{}'", text);
    list.push_back(i);
  }
  if (list.size() < 2 || list.front() != 0 || !std::is_sorted(list.begin(), list.end()) || list.back() < 1)
    refuse("--varlen: expected 0 and then ends that do not decrease, got '{}'", text);
  return list;
}

std::string text_or_file(const std::string& argument) {
  if (argument.empty() || argument[0] != '@') return argument;
  std::ifstream in(argument.substr(1), std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in) refuse("--custom-shapes: cannot read '{}'", argument.substr(1));
  return text;
}

}  // namespace

const std::vector<ShapeGroup>& shape_groups() {
  static const std::vector<ShapeGroup> groups = {
      {"cpu",
       "the default",
       {dense(1, 512, 16, 64), dense(1, 512, 16, 128), dense(1, 4096, 16, 64), dense(1, 4096, 16, 128)}},
      {"decode", "one token, with a state in and out", {dense(1, 1, 16, 64), dense(1, 1, 16, 128)}},
      {"varlen",
       "packed sequences",
       {packed("even", kEven, 64), packed("even", kEven, 128), packed("ragged", kRagged, 64),
        packed("ragged", kRagged, 128)}},
      {"gpu",
       "the six of FLA's benchmark",
       {dense(1, 8192, 96, 128), dense(2, 16384, 16, 128), dense(4, 2048, 16, 128), dense(4, 4096, 64, 128),
        dense(8, 2048, 32, 256), dense(8, 1024, 8, 64)}}};
  return groups;
}

std::vector<NamedShape> bench_shapes(const std::string& names, const std::string& custom, const std::string& varlen) {
  std::vector<NamedShape> chosen;
  const auto add = [&](const NamedShape& s) {
    if (std::none_of(chosen.begin(), chosen.end(), [&](const NamedShape& c) { return c.name == s.name; }))
      chosen.push_back(s);
  };
  const auto add_named = [&](const std::string& name) {
    bool found = false;
    std::string known;
    for (const auto& g : shape_groups()) {
      known += (known.empty() ? "" : ", ") + g.name + " (";
      for (const auto& s : g.shapes) {
        known += (&s == &g.shapes.front() ? "" : " ") + s.name;
        if (name != g.name && name != s.name) continue;
        add(s);
        found = true;
      }
      known += ")";
    }
    if (!found) refuse("--shapes: expected {}, got '{}'", known, name);
  };
  if (!names.empty())
    for (const auto& name : split(names, ',')) add_named(name);
  if (!custom.empty()) {
    const auto parsed = parse_custom_shapes(text_or_file(custom));
    if (!parsed) refuse("--custom-shapes: {}", parsed.status().message());
    for (const auto& s : *parsed) {
      if (std::any_of(chosen.begin(), chosen.end(), [&](const NamedShape& c) { return c.name == s.name; }))
        refuse("--custom-shapes: '{}' is also the name of a shape chosen by --shapes", s.name);
      chosen.push_back(s);
    }
  }
  if (!varlen.empty()) {
    const auto cu = varlen_set(varlen);
    const std::string set = varlen == "even" || varlen == "ragged" ? varlen : "packed";
    add(packed(set, cu, 64));
    add(packed(set, cu, 128));
  }
  if (chosen.empty()) chosen = shape_groups().front().shapes;
  return chosen;
}

}  // namespace fla::tools
