#include "tools/common/fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "fla/registry/dynamic.h"
#include "tools/common/buffer.h"
#include "tools/common/compare.h"
#include "tools/common/json_strict.h"
#include "tools/common/placement.h"
#include "tools/common/safetensors.h"

namespace fla::tools {

namespace {

using Json = nlohmann::json;

// Entries of `flags` that are for whoever runs the file, not for the function.
constexpr std::string_view kDriverFlags[] = {
    "scale_is_default", "output_final_state", "min_relative_gap", "split", "L", "TK", "cached"};

struct File {
  std::string path, name, family;
  std::shared_ptr<SafeTensorsFile> tensors;
  std::vector<std::string> functions, grad_functions;
  std::map<std::string, std::map<std::string, std::string>> argument_names;  // function -> name in the file -> argument
  Json flags;
  std::optional<double> scale;
  std::vector<std::string> inputs, outputs, upstreams, gradients;  // names without their prefix
  double rms_upstream = 0.0;                                       // over all grad_out together

  TensorView view(const std::string& n) const { return tensors->tensors().at(n); }
  Status error(const std::string& what) const { return {Code::InvalidArgument, path + ": " + what}; }
  bool flag(const char* n) const { return flags.contains(n) && flags[n].is_boolean() && flags[n].get<bool>(); }
};

Result<std::vector<std::string>> string_list(const File& f, const std::string& key) {
  const auto& meta = f.tensors->metadata();
  const auto it = meta.find(key);
  if (it == meta.end()) return f.error("metadata: " + key + ": missing");
  Result<Json> j = parse_json_strict<Json>(it->second);
  if (!j) return f.error("metadata: " + key + ": " + j.status().message());
  if (!j->is_array() || !std::ranges::all_of(*j, [](const Json& x) { return x.is_string(); }))
    return f.error("metadata: " + key + ": expected a list of names");
  return j->get<std::vector<std::string>>();
}

Result<File> read(const std::filesystem::path& path) {
  File f;
  f.path = path.string();
  f.name = path.stem().string();
  Result<std::shared_ptr<SafeTensorsFile>> opened = SafeTensorsFile::open(path);
  if (!opened) return opened.status();
  f.tensors = *opened;
  if (!f.tensors->unsupported().empty()) {
    const auto& [name, type] = *f.tensors->unsupported().begin();
    return f.error(name + ": element type " + type + " is not supported");
  }
  const auto& meta = f.tensors->metadata();
  if (const auto it = meta.find("family"); it != meta.end()) f.family = it->second;

  Result<std::vector<std::string>> functions = string_list(f, "functions");
  if (!functions) return functions.status();
  f.functions = std::move(*functions);
  if (f.functions.empty()) return f.error("metadata: functions: names no function");
  Result<std::vector<std::string>> grads = string_list(f, "grad_functions");
  if (!grads) return grads.status();
  f.grad_functions = std::move(*grads);

  const auto object = [&](const char* key) -> Result<Json> {
    const auto it = meta.find(key);
    if (it == meta.end() || it->second.empty()) return Json::object();
    Result<Json> j = parse_json_strict<Json>(it->second);
    if (!j) return f.error(std::string("metadata: ") + key + ": " + j.status().message());
    if (!j->is_object()) return f.error(std::string("metadata: ") + key + ": expected an object");
    return j;
  };
  Result<Json> flags = object("flags");
  if (!flags) return flags.status();
  f.flags = std::move(*flags);
  Result<Json> names = object("argument_names");
  if (!names) return names.status();
  for (const auto& [function, map] : names->items()) {
    if (!map.is_object()) return f.error("metadata: argument_names: " + function + ": expected an object");
    for (const auto& [from, to] : map.items()) {
      if (!to.is_string()) return f.error("metadata: argument_names: " + function + ": expected names");
      f.argument_names[function][from] = to.get<std::string>();
    }
  }
  if (const auto it = meta.find("scale"); it != meta.end() && !it->second.empty()) {
    char* end = nullptr;
    const double s = std::strtod(it->second.c_str(), &end);
    if (*end != '\0' || !std::isfinite(s))
      return f.error("metadata: scale: expected a number, got '" + excerpt(it->second) + "'");
    f.scale = s;
  }

  double squares = 0.0, count = 0.0;
  for (const auto& [name, t] : f.tensors->tensors()) {
    if (name.starts_with("out.")) {
      f.outputs.push_back(name.substr(4));
    } else if (name.starts_with("grad_out.")) {
      f.upstreams.push_back(name.substr(9));
      const double r = rms(t);
      squares += r * r * static_cast<double>(t.numel());
      count += static_cast<double>(t.numel());
    } else if (name.starts_with("grad.")) {
      f.gradients.push_back(name.substr(5));
    } else if (!name.starts_with("aux.")) {
      f.inputs.push_back(name);
    }
  }
  f.rms_upstream = count > 0.0 ? std::sqrt(squares / count) : 1.0;
  if (f.outputs.empty()) return f.error("has no expected output (out.*)");
  for (const auto& u : f.upstreams)
    if (std::ranges::count(f.outputs, u) == 0) return f.error("grad_out." + u + ": there is no out." + u);
  return f;
}

class Runner {
 public:
  Runner(const File& file, const Registry::Entry& e, const CheckOptions& options, const Context& ctx,
         CheckResult& result)
      : file_(file), entry_(e), options_(options), ctx_(ctx), result_(result) {}

  // An error is the file's; what the function does wrong goes into the result.
  Status run() {
    if (Status s = prepare(); !s) return s;
    if (Status s = default_scale(); !s) {
      fail(s.message());
      return {};
    }
    if (file_.flags.contains("split")) {
      split_run();
      finish();
      return {};
    }
    if (!forward()) return {};
    if (!file_.gradients.empty()) backward();
    finish();
    return {};
  }

 private:
  const FunctionSpec& spec() const { return entry_.spec; }

  std::string argument(const std::string& in_file) const {
    const auto f = file_.argument_names.find(spec().name);
    if (f == file_.argument_names.end()) return in_file;
    // "initial_state.0" is renamed as "initial_state" is.
    const auto it = f->second.find(in_file);
    return it == f->second.end() ? in_file : it->second;
  }

  const ArgSpec* input_spec(const std::string& name) const {
    std::string plain = name;
    if (spec().pair_state && plain.ends_with(".0")) plain.resize(plain.size() - 2);
    const ArgSpec* a = spec().find_arg(plain);
    return a != nullptr && a->role == Role::Input ? a : nullptr;
  }

  void fail(const std::string& reason) {
    result_.status = CheckResult::Status::Failed;
    if (result_.reason.empty()) result_.reason = reason;
  }
  void stop(const Status& s) {
    if (s.code() == Code::Unsupported) {
      result_.status = CheckResult::Status::NotCovered;
      result_.reason = s.message();
    } else {
      fail(s.message());
    }
  }

  // Whether a backend that is the only one allowed has a kernel for the function at all.
  static bool serves(const Registry::Entry& e, const std::string& backend) {
    return backend.empty() || backend == kReference || std::ranges::any_of(e.candidates, [&](const auto& c) {
             return c.backend->name == backend && c.kernel != nullptr;
           });
  }

  bool family_has_flag(const std::string& name) const {
    return std::ranges::any_of(ctx_.registry().entries(), [&](const Registry::Entry* e) {
      return e->spec.operation == spec().operation && e->spec.find_flag(name) != nullptr;
    });
  }

  Status prepare() {
    for (const auto& name : file_.inputs) {
      const std::string arg = argument(name);
      const ArgSpec* a = input_spec(arg);
      if (a == nullptr) return file_.error(name + ": " + spec().name + " takes no such tensor");
      TensorView t = file_.view(name);
      if (options_.dtype != DType::F32 && a->types == Types::Wide) {
        owned_.push_back(cast(t, options_.dtype));
        t = owned_.back().view();
      }
      inputs_.emplace_back(arg, t);
    }
    for (const auto& name : file_.gradients)
      if (input_spec(argument(name)) == nullptr)
        return file_.error("grad." + name + ": " + spec().name + " has no input " + name);
    for (const auto& [name, value] : file_.flags.items()) {
      const FlagSpec* flag = spec().find_flag(name);
      const bool driver = std::ranges::count(kDriverFlags, std::string_view(name)) > 0;
      if (flag == nullptr) {
        if (driver) continue;
        if (!family_has_flag(name))
          return file_.error("flags: " + name + ": no function of " + spec().operation + " has this flag");
        result_.dropped_flags.push_back(name);
        continue;
      }
      FlagValue v;
      if (value.is_boolean())
        v = value.get<bool>();
      else if (value.is_number_integer())
        v = value.get<std::int64_t>();
      else if (value.is_number())
        v = value.get<double>();
      else if (!value.is_null())
        return file_.error("flags: " + name + ": expected a boolean, a number or null, got " + value.dump());
      flags_.emplace_back(name, v);
    }
    if (file_.scale && !file_.flag("scale_is_default")) {
      if (spec().find_flag("scale") == nullptr) return file_.error("scale: " + spec().name + " has no scale");
      flags_.emplace_back("scale", *file_.scale);
    }
    return {};
  }

  // The number that stands in for an absent scale must be the one the expected values were made with.
  Status default_scale() const {
    if (!file_.flag("scale_is_default") || !file_.scale) return {};
    // Without a flag the scale is K^(-1/2), fixed.
    const FlagSpec* flag = spec().find_flag("scale");
    double def = std::numeric_limits<double>::quiet_NaN();
    if (const auto* d = flag != nullptr ? std::get_if<double>(&flag->def) : nullptr) def = *d;
    for (const auto& [name, t] : inputs_) {
      if (!std::isnan(def)) break;
      const ArgSpec* a = input_spec(name);
      for (std::size_t i = 0; i < a->dims.size(); ++i)
        if (a->role == Role::Input && a->swapped_by.empty() && a->dims[i] == "K")
          def = 1.0 / std::sqrt(static_cast<double>(t.dim(static_cast<int>(i))));
    }
    if (!(std::abs(def - *file_.scale) <= 1e-6 * std::abs(*file_.scale)))
      return {Code::InvalidArgument,
              "scale: default is " + std::to_string(def) + ", the file expects " + std::to_string(*file_.scale)};
    return {};
  }

  Status build(DynamicCall& call, std::optional<std::pair<std::int64_t, std::int64_t>> tokens) const {
    Result<DynamicCall> made = DynamicCall::make(ctx_.registry(), spec().name);
    if (!made) return made.status();
    call = std::move(*made);
    for (const auto& [name, v] : flags_)
      if (Status s = call.set_flag(name, v); !s) return s;
    for (auto [name, t] : inputs_) {
      const ArgSpec* a = input_spec(name);
      if (tokens)
        for (std::size_t i = 0; i < a->dims.size(); ++i)
          if (a->dims[i] == "T") t = slice(t, static_cast<int>(i), tokens->first, tokens->second - tokens->first);
      if (Status s = call.set(name, t); !s) return s;
    }
    return {};
  }

  // Runs in poisoned, guarded memory; the tensors by name in `made`.
  Status execute(DynamicCall& call, std::map<std::string, Buffer>& made, std::string& backend) const {
    Result<std::vector<DynamicCall::Output>> outputs = call.outputs(ctx_);
    if (!outputs) return outputs.status();
    for (const auto& o : *outputs) {
      Buffer b(o.dtype, o.shape);
      if (o.contents) assign(b.view(), values(o.contents));
      if (Status s = call.bind(o.name, b.view()); !s) return s;
      made.emplace(o.name, std::move(b));
    }
    const Executed x = tools::execute(ctx_, call, options_.device);
    if (!x.status) return x.status;
    backend = x.route.backend;
    for (const auto& [name, b] : made)
      if (!b.guards_intact()) return {Code::Internal, name + ": written outside the tensor"};
    return x.faults.empty() ? Status() : Status(Code::Internal, x.faults.front());
  }

  bool forward() {
    std::map<std::string, Buffer> made;
    std::string backend;
    if (Status s = build(call_, {}); !s) return stop(s), false;
    if (Status s = execute(call_, made, backend); !s) return stop(s), false;
    result_.backend = backend;
    for (const auto& name : file_.outputs) compare_output(name, made, backend);
    return true;
  }

  void backward() {
    const bool fla_has_one = std::ranges::count(file_.grad_functions, spec().name) > 0;
    if (spec().backward.empty()) {
      if (fla_has_one) fail("has no backward, the file has gradients for it");
      return;
    }
    Result<DynamicCall> call = call_.backward(ctx_.registry());
    if (!call) return stop(call.status());
    if (!serves(call->entry(), ctx_.options().backend)) {
      for (const auto& name : file_.gradients) result_.uncovered.push_back("grad." + name);
      return;
    }
    for (const auto& name : file_.upstreams) {
      TensorView t = file_.view("grad_out." + name);
      if (options_.dtype != DType::F32) {
        owned_.push_back(cast(t, options_.dtype));
        t = owned_.back().view();
      }
      if (Status s = call->set("grad_out." + name, t); !s) return stop(s);
    }
    std::map<std::string, Buffer> made;
    std::string backend;
    if (Status s = execute(*call, made, backend); !s) return stop(s);
    if (backend != result_.backend) result_.backend += "/" + backend;
    for (const auto& name : file_.gradients) {
      const auto it = made.find("grad." + argument(name));
      if (it == made.end()) {
        missing("grad." + name);
      } else {
        judge("grad." + name, file_.view("grad." + name), it->second.view(), true, argument(name), backend);
      }
    }
  }

  // The first `split` tokens, then the rest from the returned state; time-long outputs are joined.
  void split_run() {
    const Json& at = file_.flags["split"];
    if (!at.is_number_integer()) return fail("flags: split: expected an integer");
    const auto split = at.get<std::int64_t>();
    std::int64_t T = -1;
    for (const auto& [name, t] : inputs_) {
      const ArgSpec* a = input_spec(name);
      for (std::size_t i = 0; i < a->dims.size(); ++i)
        if (a->dims[i] == "T") T = t.dim(static_cast<int>(i));
    }
    if (split <= 0 || split >= T)
      return fail("flags: split: expected 1 to T - 1 = " + std::to_string(T - 1) + ", got " + std::to_string(split));
    std::map<std::string, Buffer> first, second;
    std::string backend;
    DynamicCall call;
    const auto ask_state = [&] {
      return spec().find_flag("output_final_state") != nullptr ? call.set_flag("output_final_state", true) : Status();
    };
    if (Status s = build(call, std::pair{std::int64_t{0}, split}); !s) return stop(s);
    if (Status s = ask_state(); !s) return stop(s);
    if (Status s = execute(call, first, backend); !s) return stop(s);
    if (Status s = build(call, std::pair{split, T}); !s) return stop(s);
    if (Status s = ask_state(); !s) return stop(s);
    // Where the state does not say how far it goes, the count of its tokens comes with it.
    const bool counted = input_spec("past_tokens") != nullptr;
    const std::string state = counted ? "past_state" : "initial_state";
    Buffer past;
    for (const auto& [name, b] : first) {
      if (!name.starts_with("out.final_state")) continue;
      if (Status s = call.set(state + name.substr(15), b.view()); !s) return stop(s);
      if (!counted) continue;
      past = Buffer(DType::I64, {b.view().dim(0)});
      fill(past.view(), static_cast<double>(split));
      if (Status s = call.set("past_tokens", past.view()); !s) return stop(s);
    }
    if (Status s = execute(call, second, backend); !s) return stop(s);
    result_.backend = backend;
    for (const auto& name : file_.outputs) {
      const auto a = first.find("out." + name), b = second.find("out." + name);
      const ArgSpec* arg = spec().find_arg(name);
      const auto axis = arg == nullptr ? -1 : std::ranges::find(arg->dims, "T") - arg->dims.begin();
      if (b != second.end() && arg != nullptr && axis < std::ssize(arg->dims)) {
        Shape shape = b->second.shape();
        shape[static_cast<std::size_t>(axis)] = T;
        Buffer joined(b->second.dtype(), shape);
        assign(slice(joined.view(), static_cast<int>(axis), 0, split), values(a->second.view()));
        assign(slice(joined.view(), static_cast<int>(axis), split, T - split), values(b->second.view()));
        second.insert_or_assign("out." + name, std::move(joined));
      }
      compare_output(name, second, backend);
    }
  }

  void missing(const std::string& name) {
    TensorResult r;
    r.name = name;
    r.R = r.max_abs = std::numeric_limits<double>::quiet_NaN();
    r.reason = "this function does not give it";
    result_.tensors.push_back(std::move(r));
  }

  void compare_output(const std::string& name, const std::map<std::string, Buffer>& made, const std::string& backend) {
    std::string ours = name;
    const bool sorted = ours.ends_with("_sorted");
    if (sorted) ours.resize(ours.size() - 7);
    const auto it = made.find("out." + ours);
    if (it == made.end()) return missing("out." + name);
    if (!sorted) return judge("out." + name, file_.view("out." + name), it->second.view(), false, name, backend);
    // A selection has no order: each list sorted.
    const TensorView t = it->second.view();
    std::vector<double> x = values(t);
    const std::int64_t width = std::max<std::int64_t>(t.dim(t.ndim - 1), 1);
    for (auto row = x.begin(); row != x.end(); row += width) std::sort(row, row + width);
    const Buffer in_order(t.dtype, {t.dims().begin(), t.dims().end()});
    assign(in_order.view(), x);
    judge("out." + name, file_.view("out." + name), in_order.view(), false, name, backend);
  }

  Limits limits(bool gradient, const std::string& tensor, const std::string& backend) const {
    Limits l;
    if (options_.dtype == DType::F32) {
      l.R = backend == kReference ? 1e-5 : backend.starts_with("cuda") ? 1e-3 : 1e-4;
      if (gradient && file_.family == "mesa_net") l.R = std::min(10.0 * l.R, 5e-3);
      if (file_.family == "abc" && file_.name == "wide_slot_range") l.R *= 10.0;
      l.zero = 1e-5;
      return l;
    }
    const double page = spec().tolerance_of((gradient ? "d" : "") + tensor);
    l.R = options_.dtype == DType::F16 ? page : std::max(page, gradient ? 0.01 : 0.005);
    l.zero = l.R * file_.rms_upstream;
    return l;
  }

  void judge(const std::string& name, const TensorView& expected, const TensorView& got, bool gradient,
             const std::string& tensor, const std::string& backend) {
    Difference d;
    if (is_float(expected.dtype)) {
      d = compare(expected, got, limits(gradient, tensor, backend));
    } else {  // indices are right or wrong
      d = compare(expected, got, {.R = 0.0, .floor = 0.0});
    }
    TensorResult r;
    r.name = name;
    r.R = d.R;
    r.max_abs = d.max_abs;
    r.index = d.index;
    r.limit = d.limit;
    r.block_R = d.block_R;
    r.ok = d.ok;
    r.reason = d.reason;
    result_.tensors.push_back(std::move(r));
  }

  void finish() {
    if (result_.status == CheckResult::Status::Failed || !result_.reason.empty()) return;
    result_.status = CheckResult::Status::Ok;
    for (const auto& t : result_.tensors)
      if (!t.ok) fail(t.name + ": " + t.reason);
  }

  const File& file_;
  const Registry::Entry& entry_;
  const CheckOptions& options_;
  const Context& ctx_;
  CheckResult& result_;
  std::vector<std::pair<std::string, TensorView>> inputs_;  // by argument
  std::vector<std::pair<std::string, FlagValue>> flags_;
  std::vector<Buffer> owned_;
  DynamicCall call_;
};

}  // namespace

const char* name_of(CheckResult::Status s) {
  switch (s) {
    case CheckResult::Status::Ok: return "ok";
    case CheckResult::Status::Failed: return "failed";
    case CheckResult::Status::NotCovered: return "not_covered";
  }
  return "?";
}

Result<std::vector<CheckResult>> check_file(const std::filesystem::path& path, const CheckOptions& options,
                                            const Context& ctx) {
  if (!options.backend.empty() && options.backend != ctx.options().backend) {
    ContextOptions forced = ctx.options();
    forced.backend = options.backend;
    CheckOptions inner = options;
    inner.backend.clear();
    return check_file(path, inner, Context(std::move(forced)));
  }
  Result<File> file = read(path);
  if (!file) return file.status();
  std::vector<CheckResult> results;
  for (const auto& function : file->functions) {
    if (!options.function.empty() && function != options.function) continue;
    CheckResult r;
    r.file = file->path;
    r.function = function;
    r.dtype = options.dtype;
    const Registry::Entry* e = ctx.registry().find(function);
    if (e == nullptr) {
      r.reason = "no function " + excerpt(function) + " in this build";
    } else if (Status s = Runner(*file, *e, options, ctx, r).run(); !s) {
      return s;
    }
    results.push_back(std::move(r));
  }
  return results;
}

Result<std::vector<std::string>> recorded_functions(const std::filesystem::path& path) {
  Result<File> file = read(path);
  if (!file) return file.status();
  return std::move(file->functions);
}

std::vector<std::filesystem::path> find_cases(const std::filesystem::path& file_or_folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::path> files;
  if (!fs::is_directory(file_or_folder, error)) {
    if (fs::exists(file_or_folder, error)) files.push_back(file_or_folder);
    return files;
  }
  for (fs::recursive_directory_iterator it(file_or_folder, fs::directory_options::follow_directory_symlink, error), end;
       it != end; it.increment(error)) {
    if (error) break;
    if (it->path().extension() == ".safetensors") files.push_back(it->path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace fla::tools
