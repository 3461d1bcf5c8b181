// fla ops: the public operators, as their OpSpecs describe them.
#include <algorithm>
#include <cctype>
#include <memory>
#include <set>

#include "CLI/CLI.hpp"
#include "fla/registry/registry.h"
#include "tools/command.h"
#include "tools/compare/base_build.h"
#include "tools/function_list.h"
#include "tools/gpu/watch.h"

namespace fla::tools {
namespace {

using Entry = Registry::Entry;

struct Options {
  std::string filter;
  std::vector<std::string> signatures;
  bool check = false, env = false, markdown = false, json = false;
};

std::vector<std::string> dtypes_of(const FunctionSpec& spec, const ArgSpec& a) {
  switch (a.types) {
    case Types::Wide:
    case Types::Float: return {"F32", "F16", "BF16", "F64"};
    case Types::Acc: return {"F32", "F64"};
    case Types::Index: return {"I32", "I64"};
    case Types::Like: {
      const ArgSpec* other = spec.find_arg(a.like);
      return other != nullptr ? dtypes_of(spec, *other) : std::vector<std::string>{};
    }
  }
  return {};
}

const ArgSpec* first_wide(const FunctionSpec& spec) {
  for (const auto& a : spec.args)
    if (a.role == Role::Input && a.types == Types::Wide) return &a;
  return nullptr;
}

// "F32 F16 BF16 F64", "as q" or "F32, or F64 as q"
std::string types_text(const FunctionSpec& spec, const ArgSpec& a) {
  if (a.types == Types::Like) return "as " + a.like;
  const ArgSpec* wide = first_wide(spec);
  if (a.types == Types::Wide && wide != nullptr && wide->name != a.name) return "as " + wide->name;
  const std::vector<std::string> types = dtypes_of(spec, a);
  return a.types == Types::Acc && wide != nullptr ? join(types, ", or ") + " as " + wide->name : join(types, " ");
}

const char* type_name(FlagSpec::Type t) {
  switch (t) {
    case FlagSpec::Type::Bool: return "bool";
    case FlagSpec::Type::Int: return "int";
    case FlagSpec::Type::Float: return "float";
  }
  return "?";
}

Json or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json default_json(const FlagValue& v) {
  if (const auto* b = std::get_if<bool>(&v)) return *b;
  if (const auto* i = std::get_if<std::int64_t>(&v)) return *i;
  if (const auto* d = std::get_if<double>(&v)) return *d;
  return nullptr;
}

const Entry* backward_of(const Registry& r, const Entry& e) {
  return e.spec.backward.empty() ? nullptr : r.find(e.spec.backward);
}

bool has(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

std::string limits_text(const FlagSpec& f) {
  std::string s = f.limits();
  if (f.power_of_two && f.min < f.max) s += s.empty() ? "a power of two" : ", a power of two";
  return s;
}

Json to_json(const Registry& r, const Entry& e) {
  const FunctionSpec& spec = e.spec;
  Json args = Json::array(), flags = Json::array(), outputs = Json::array(), output_args = Json::array();
  for (const auto& a : spec.args) {
    Json j = {{"name", a.name},
              {"in_files", a.name_in_files(0)},
              {"list", or_null(a.count)},
              {"dims", a.dims},
              {"dtypes", dtypes_of(spec, a)}};
    if (a.role == Role::Input || a.role == Role::Upstream) {
      j["required"] = a.required;
      j["grad"] = a.grad;
      j["doc"] = a.doc;
      args.push_back(std::move(j));
    } else {
      outputs.push_back(a.name);
      j["requested_by"] = or_null(a.requested_by);
      output_args.push_back(std::move(j));
    }
  }
  for (const auto& f : spec.flags)
    flags.push_back({{"name", f.name},
                     {"type", type_name(f.type)},
                     {"default", default_json(f.def)},
                     {"required", f.required},
                     {"limits", or_null(limits_text(f))},
                     {"old_name_of", or_null(f.retired_for)},
                     {"doc", f.doc}});
  const auto forward = backends_of(&e), backward = backends_of(backward_of(r, e));
  std::set<std::string> names{"cpu", kReference};
  for (const auto& c : e.candidates) names.insert(c.backend->name);
  Json backends = Json::object();
  for (const auto& name : names) backends[name] = {{"forward", has(forward, name)}, {"backward", has(backward, name)}};
  return {{"name", spec.name},
          {"family", spec.operation},
          {"exported", spec.root ? "root" : "family"},
          {"deprecated", spec.deprecated},
          {"alias_of", or_null(spec.alias_of)},
          {"doc", spec.doc},
          {"source", spec.source},
          {"args", std::move(args)},
          {"flags", std::move(flags)},
          {"outputs", std::move(outputs)},
          {"output_args", std::move(output_args)},
          {"backward", or_null(spec.backward)},
          {"backends", std::move(backends)}};
}

std::string arguments_text(const FunctionSpec& spec) {
  std::vector<std::string> words;
  for (const auto& a : spec.args)
    if (a.role == Role::Input) words.push_back((a.required ? a.name : "[" + a.name + "]") + (a.list() ? "..." : ""));
  return join(words, " ");
}

std::string gradients_text(const FunctionSpec& spec) {
  std::vector<std::string> words;
  for (const auto& a : spec.args)
    if (a.grad) words.push_back(a.name);
  return join(words, " ");
}

std::string note_text(const FunctionSpec& spec) {
  std::string note;
  if (spec.deprecated)
    note = "deprecated: " + spec.alias_of;
  else if (!spec.root)
    note = "exported by its family";
  return note;
}

void print_operators(const Registry& r, const std::vector<const Entry*>& list) {
  std::vector<std::vector<std::string>> rows{
      {"family", "function", "forward", "backward", "arguments ([optional])", ""}};
  for (const Entry* e : list)
    rows.push_back({e->spec.operation, e->spec.name, join(backends_of(e)), join(backends_of(backward_of(r, *e))),
                    arguments_text(e->spec), note_text(e->spec)});
  print_table(rows);
}

void print_markdown(const Registry& r, const std::vector<const Entry*>& list) {
  print(
      "| family | function | forward | backward | arguments, optional ones in brackets | gradients |\n"
      "|---|---|---|---|---|---|\n");
  for (const Entry* e : list) {
    const std::string text = note_text(e->spec), note = text.empty() ? "" : fmt::format(" ({})", text);
    print("| {} | `{}`{} | {} | {} | {} | {} |\n", e->spec.operation, e->spec.name, note, join(backends_of(e)),
          join(backends_of(backward_of(r, *e))), arguments_text(e->spec), gradients_text(e->spec));
  }
}

void print_signature(const Registry& r, const FunctionSpec& spec) {
  std::vector<std::string> words;
  for (const auto& a : spec.args)
    if (a.role == Role::Input || a.role == Role::Upstream) words.push_back(a.required ? a.name : a.name + "=none");
  for (const auto& f : spec.flags)
    if (f.retired_for.empty()) words.push_back(f.required ? f.name : f.name + "=" + to_string(f.def));
  print("{}({})\n", spec.name, join(words));
  if (!spec.doc.empty()) print("  {}\n", spec.doc);
  if (!spec.source.empty()) print("  {}\n", spec.source);
  if (spec.deprecated) print("  Deprecated: {} serves it.\n", spec.alias_of);
  std::vector<std::vector<std::string>> rows;
  const auto section = [&](const char* title, auto&& wanted) {
    bool any = false;
    for (const auto& a : spec.args) {
      if (!wanted(a)) continue;
      if (!any) rows.push_back({std::string("  ") + title});
      any = true;
      std::vector<std::string> facts;
      if (a.role != Role::Input || a.list()) facts.push_back("in files " + a.name_in_files(0));
      if (a.list()) facts.push_back("a list of " + a.count);
      if (a.role == Role::Input) facts.push_back(a.required ? "required" : "optional");
      if (a.role == Role::Upstream) facts.push_back("optional");
      if (a.grad) facts.push_back("gradient");
      if (!a.requested_by.empty()) facts.push_back("with " + a.requested_by);
      std::string doc = a.doc;
      if (a.role == Role::Upstream) doc = "gradient of " + a.of + "; absent = zeros";
      if (a.role == Role::Gradient) doc = "gradient of " + a.of;
      if (!a.swapped_by.empty()) doc += (doc.empty() ? "" : "; ") + ("last two axes swapped by " + a.swapped_by);
      rows.push_back({"    " + a.name, "[" + join(a.dims) + "]", types_text(spec, a), join(facts), doc});
    }
  };
  section("inputs", [](const ArgSpec& a) { return a.role == Role::Input || a.role == Role::Upstream; });
  if (!spec.flags.empty()) rows.push_back({"  flags"});
  for (const auto& f : spec.flags) {
    const std::string limits = limits_text(f);
    rows.push_back(
        {"    " + f.name, type_name(f.type), f.required ? "required" : "default " + to_string(f.def), limits, f.doc});
  }
  section("outputs", [](const ArgSpec& a) { return a.role == Role::Output || a.role == Role::Gradient; });
  // A title alone in its row must not widen the first column: pad by hand.
  std::size_t width[4] = {};
  for (const auto& row : rows)
    for (std::size_t i = 0; row.size() > 1 && i < 4; ++i) width[i] = std::max(width[i], row[i].size());
  for (const auto& row : rows) {
    std::string line = row[0];
    for (std::size_t i = 1; i < row.size(); ++i) {
      line.resize(line.size() + width[i - 1] - row[i - 1].size() + 2, ' ');
      line += row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    print("{}\n", line);
  }
  std::vector<std::string> widths;
  for (const auto& [symbol, most] : spec.max_dim)
    if (most > 0) widths.push_back(fmt::format("{} up to {}", symbol, most));
  if (!widths.empty()) print("  widths: {}\n", join(widths));
  const Entry* e = r.find(spec.name);
  print("  backends: {}\n", join(backends_of(e)));
  if (!spec.backward.empty()) print("  backward: {} ({})\n", spec.backward, join(backends_of(r.find(spec.backward))));
}

struct Check {
  std::vector<std::string> absent, extra, uncovered, defects;
  bool ok() const { return absent.empty() && extra.empty() && uncovered.empty() && defects.empty(); }
};

Check check_list(const Registry& r) {
  Check c;
  c.defects = r.defects();
  for (const char* name : kRootFunctions) {
    const Entry* e = r.find(name);
    if (e == nullptr || e->spec.is_backward() || !e->spec.root) c.absent.push_back(name);
  }
  for (const Entry* e : r.entries()) {
    const FunctionSpec& spec = e->spec;
    if (spec.is_backward()) continue;
    if (spec.root && std::find(kRootFunctions.begin(), kRootFunctions.end(), spec.name) == kRootFunctions.end())
      c.extra.push_back(spec.name);
    if (!has(backends_of(e), "cpu")) c.uncovered.push_back(spec.name);
    if (!spec.backward.empty() && !has(backends_of(r.find(spec.backward)), "cpu")) c.uncovered.push_back(spec.backward);
  }
  return c;
}

int run(const Options& o) {
  const Registry& r = Registry::global();
  if (static_cast<int>(o.check) + static_cast<int>(o.env) + static_cast<int>(o.markdown) +
          static_cast<int>(!o.signatures.empty()) >
      1)
    refuse("ops: expected one of --check, --env, --markdown and --signature, got several");
  if (o.markdown && o.json) refuse("ops: --markdown: expected without --json");
  for (const auto& name : o.signatures)
    if (r.find(name) == nullptr) refuse("--signature: unknown operator '{}'; nearest: {}", name, join(r.nearest(name)));

  std::vector<const Entry*> list;
  for (const Entry* e : r.entries()) {
    const FunctionSpec& spec = e->spec;
    if (!o.signatures.empty() ? !has(o.signatures, spec.name)
                              : spec.is_backward() || (spec.name.find(o.filter) == std::string::npos &&
                                                       spec.operation.find(o.filter) == std::string::npos))
      continue;
    list.push_back(e);
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const Entry* a, const Entry* b) { return a->spec.operation < b->spec.operation; });

  const Check check = o.check ? check_list(r) : Check{};
  std::vector<EnvVariable> env;
  if (o.env) {
    env = environment_variables(r);
    env.push_back({kCacheVariable, "$XDG_CACHE_HOME/fla or ~/.cache/fla",
                   "where this program keeps the libraries that `fla verify --base` has built"});
    env.push_back({kNvmlVariable, "libnvidia-ml.so.1", "the driver's library that tells a GPU's clocks and load"});
  }
  if (o.json) {
    Json out;
    out["ops"] = Json::array();
    for (const Entry* e : list) out["ops"].push_back(to_json(r, *e));
    if (o.check)
      out["check"] = {{"expected", kRootFunctions.size()}, {"absent", check.absent},   {"extra", check.extra},
                      {"uncovered", check.uncovered},      {"defects", check.defects}, {"ok", check.ok()}};
    if (o.env) {
      out["env"] = Json::array();
      for (const auto& v : env) out["env"].push_back({{"name", v.name}, {"default", v.def}, {"effect", v.effect}});
    }
    print_json(out);
  } else if (o.check) {
    print("{} functions expected, {} absent, {} extra, {} uncovered (no cpu backend)\n", kRootFunctions.size(),
          check.absent.size(), check.extra.size(), check.uncovered.size());
    for (const auto& name : check.absent) print("  absent     {}\n", name);
    for (const auto& name : check.extra) print("  extra      {}\n", name);
    for (const auto& name : check.uncovered) print("  uncovered  {}\n", name);
    for (const auto& text : check.defects) print("  defect     {}\n", text);
  } else if (o.env) {
    std::vector<std::vector<std::string>> rows{{"variable", "default", "effect"}};
    for (const auto& v : env) rows.push_back({v.name, v.def, v.effect});
    print_table(rows);
  } else if (o.markdown) {
    print_markdown(r, list);
  } else if (!o.signatures.empty()) {
    for (const auto& name : o.signatures) {
      if (&name != &o.signatures.front()) print("\n");
      print_signature(r, r.find(name)->spec);
    }
  } else if (!list.empty()) {
    print_operators(r, list);
  }
  if (o.check) return check.ok() ? kGood : kFailed;
  if (list.empty() && !o.env)
    throw Stop(kNothing, fmt::format("--filter: no operator's name or family contains '{}'", o.filter));
  return kGood;
}

}  // namespace

Command add_ops(CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(root, "ops", "List the public operators: signatures, gradients, backends",
                              "  fla ops --filter gla\n  fla ops --signature chunk_gla\n  fla ops --check --json");
  app->add_option("--filter", o->filter, "only those whose name or family contains TEXT");
  app->add_option("--signature", o->signatures, "the typed signature of an operator; repeatable");
  app->add_flag("--check", o->check,
                "compare with the list of the 55 functions; exit 1 when one is absent, extra or uncovered");
  app->add_flag("--env", o->env, "environment variables that the library and this program read");
  app->add_flag("--markdown", o->markdown, "the operator table as README.md has it");
  add_json(app, o->json);
  return {app, [o] { return run(*o); }};
}

}  // namespace fla::tools
