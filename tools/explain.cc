// fla explain: how a call would be served, without its tensors.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>

#include "CLI/CLI.hpp"
#include "fla/registry/dynamic.h"
#include "tools/call_sizes.h"
#include "tools/command.h"
#include "tools/common/machine.h"
#include "tools/plugin/child.h"

namespace fla::tools {
namespace {

struct Options {
  std::string op, shape;
  std::vector<std::string> set, with;
  CallOptions call;
  PluginOptions plugin;
  bool json = false;
};

// Where every tensor of the call seems to lie. Explaining reads shapes and types; nothing goes through this address.
alignas(64) std::array<std::byte, 64> nowhere;

DType type_of(const FunctionSpec& spec, const ArgSpec& a, DType wide) {
  switch (a.types) {
    case Types::Wide: return wide;
    case Types::Float:
    case Types::Acc: return DType::F32;
    case Types::Index: return DType::I64;
    case Types::Like: return type_of(spec, *spec.find_arg(a.like), wide);
  }
  return wide;
}

// "cu_seqlens" or "cu_seqlens=0,20,64"
std::vector<std::int64_t> boundaries(const std::string& with, std::int64_t T) {
  const std::size_t equals = with.find('=');
  if (equals == std::string::npos) return {0, T / 2, T};
  std::vector<std::int64_t> list;
  for (const auto& word : split(with.substr(equals + 1), ',')) {
    std::int64_t i = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), i);
    if (error != std::errc() || end != word.data() + word.size())
      refuse("--with: cu_seqlens: expected integers separated by commas, got '{}'", word);
    list.push_back(i);
  }
  return list;
}

Json to_json(const Route& r) {
  Json steps = Json::array();
  for (const auto& s : r.steps)
    steps.push_back({{"backend", s.backend},
                     {"kernel", s.kernel.empty() ? Json(nullptr) : Json(s.kernel)},
                     {"outcome", name_of(s.outcome)},
                     {"reason", s.reason}});
  return {{"function", r.function},
          {"chosen", r.chosen.empty() ? Json(nullptr) : Json(r.chosen)},
          {"kernel", r.kernel.empty() ? Json(nullptr) : Json(r.kernel)},
          {"by_default", r.by_default},
          {"dispatch_disabled", r.dispatch_disabled},
          {"workspace_bytes", r.workspace_bytes},
          {"plan", r.plan.empty() ? Json(nullptr) : Json(r.plan)},
          {"steps", std::move(steps)}};
}

void print_route(const Route& r) {
  print("{}: {}\n", r.function,
        r.chosen.empty() ? "no backend takes this call"
                         : fmt::format("{}, kernel {}, workspace {}{}", r.chosen, r.kernel,
                                       bytes_text(static_cast<double>(r.workspace_bytes)),
                                       r.by_default ? " (by default: no other backend took it)" : ""));
  if (!r.plan.empty()) print("  plan: {}\n", r.plan);
  if (r.dispatch_disabled) print("  FLA_CPP_DISABLE_DISPATCH is 1: the reference serves every call\n");
  std::vector<std::vector<std::string>> rows;
  for (const auto& s : r.steps)
    rows.push_back({"  " + s.backend, s.kernel.empty() ? "-" : s.kernel, name_of(s.outcome), s.reason});
  print_table(rows);
}

void bind_outputs(const Context& ctx, DynamicCall& call, Device device) {
  for (const auto& out : check(call.outputs(ctx)))
    check(call.bind(out.name, TensorView(nowhere.data(), out.dtype, out.shape, device)));
}

int run(const Options& o) {
  const Registry& r = Registry::global();
  const FunctionSpec& spec = find_operator(r, o.op).spec;
  require_backend(r, o.call.backend);
  NamedShape shape = check(parse_shape_list(o.shape));

  std::vector<std::string> with;
  for (const auto& word : o.with) {
    const std::string name = word.substr(0, word.find('='));
    const ArgSpec* a = spec.find_arg(name);
    if (a == nullptr || a->role != Role::Input) {
      std::vector<std::string> optional;
      for (const auto& x : spec.args)
        if (x.role == Role::Input && !x.required) optional.push_back(x.name);
      refuse("--with: {} has no argument '{}'; optional ones: {}", spec.name, name, join(optional));
    } else if (a->types == Types::Index && !name.starts_with("cu_seqlens")) {
      refuse("--with: '{}' holds what no shape tells, and changes no route", name);
    } else if (a->required) {
      refuse("--with: expected an optional argument, got '{}', which every call needs and has", name);
    }
    if (name != word && !name.starts_with("cu_seqlens"))
      refuse("--with: expected '{}' without a value, got '{}'", name, word);
    if (name.starts_with("cu_seqlens")) {
      const auto T = shape.dims.find("T");
      shape.cu_seqlens = boundaries(word, T == shape.dims.end() ? 0 : T->second);
    }
    with.push_back(name);
  }
  const Sizes sizes = sizes_for(spec, shape);
  const DType wide = parse_dtype(o.call.dtype);
  const Device device{o.call.device == "cuda" ? DeviceType::Cuda : DeviceType::Cpu, 0};

  DynamicCall call = check(DynamicCall::make(r, o.op));
  for (const auto& [name, value] : spec.bench_flags) check(call.set_flag(name, value));
  for (const auto& s : o.set) {
    const std::size_t equals = s.find('=');
    if (equals == std::string::npos) refuse("--set: expected name=value, got '{}'", s);
    check(call.set_flag_text(s.substr(0, equals), s.substr(equals + 1)));
  }
  for (const auto& w : call.warnings()) print(stderr, "warning: {}\n", w);
  for (const auto& a : spec.args) {
    if (a.role != Role::Input) continue;
    if (!a.required && std::find(with.begin(), with.end(), a.name) == with.end()) continue;
    std::vector<std::int64_t> dims;
    for (std::size_t i = 0; i < a.dims.size(); ++i)
      dims.push_back(axis_size(sizes, spec, call.args(), spec.dim_symbol(a, i, call.args())));
    void* data = nowhere.data();
    // Boundaries are read on the host, so they are real.
    if (a.types == Types::Index) data = const_cast<std::int64_t*>(sizes.cu_seqlens.data());
    const bool host = a.name == "cu_seqlens_cpu";
    const TensorView t(data, type_of(spec, a, wide), dims, host ? Device{} : device);
    const std::int64_t count = a.list() ? axis_size(sizes, spec, call.args(), a.count) : 1;
    for (std::int64_t i = 0; i < count; ++i) check(call.set(a.name_in_files(static_cast<std::size_t>(i)), t));
  }

  ContextOptions options = context_options(o.call);
  options.log = {};
  const Context ctx(options);
  std::vector<Route> routes;
  bind_outputs(ctx, call, device);
  routes.push_back(check(call.explain(ctx)));
  if (!spec.backward.empty()) {
    DynamicCall backward = check(call.backward(r));
    const FunctionSpec& bspec = backward.spec();
    for (const auto& out : check(call.outputs(ctx))) {
      std::string of = out.name.substr(4);  // after "out."
      if (of.ends_with(".0") && bspec.find_arg("d" + of) == nullptr) of.resize(of.size() - 2);
      for (const auto& a : bspec.args)
        if (a.role == Role::Upstream && a.of == of)
          check(backward.set("grad_out." + of, TensorView(nowhere.data(), out.dtype, out.shape, device)));
    }
    bind_outputs(ctx, backward, device);
    routes.push_back(check(backward.explain(ctx)));
  }

  const Machine m = machine();
  bool served = true;
  for (const Route& x : routes) served = served && !x.chosen.empty();
  if (o.json) {
    Json out = {{"op", spec.name},        {"shape", shape.dims},      {"cu_seqlens", sizes.cu_seqlens},
                {"with", with},           {"dtype", o.call.dtype},    {"device", o.call.device},
                {"isa", m.isa},           {"threads", ctx.threads()}, {"served", served},
                {"routes", Json::array()}};
    if (!served) out["error"] = error_json(kUsage, spec.name + ": no backend takes this call");
    for (const Route& x : routes) out["routes"].push_back(to_json(x));
    print_json(out);
  } else {
    print("{} {} {} on {} ({}, {})\n", spec.name, o.shape, o.call.dtype, o.call.device, m.isa,
          threads_text(ctx.threads()));
    for (const Route& x : routes) print_route(x);
  }
  return served ? kGood : kUsage;
}

}  // namespace

Command add_explain(CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* app = add_command(
      root, "explain", "Which backend and kernel a call would get, and why each other one would not",
      "  fla explain chunk_gla --shape B=1,T=4096,H=16,D=128\n"
      "  fla explain chunk_gla --shape B=1,T=64,H=2,K=32,V=48 --with initial_state --with cu_seqlens=0,20,64\n"
      "  fla explain chunk_gla --shape B=1,T=1,H=16,D=64 --set output_final_state=true --dtype bf16");
  app->add_option("OP", o->op, "operator")->required();
  app->add_option("--shape", o->shape, "sizes such as B=1,T=64,H=2,D=64; K and V instead of D where they differ")
      ->required();
  app->add_option("--set", o->set, "a flag: name=value; repeatable")->allow_extra_args(false);
  app->add_option("--with", o->with, "give an optional argument; cu_seqlens may have values; repeatable")
      ->allow_extra_args(false);
  add_dtype(app, o->call);
  add_device(app, o->call);
  add_backend(app, o->call);
  add_threads(app, o->call);
  add_plugin(app, o->plugin);
  add_json(app, o->json);
  return {app, [o] {
            return with_plugin(o->plugin, o->json, {{"op", o->op}}, [&](const std::string&) { return run(*o); });
          }};
}

}  // namespace fla::tools
