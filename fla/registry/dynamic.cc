#include "fla/registry/dynamic.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "fla/core/text.h"

namespace fla {

namespace {

std::string join(const std::vector<std::string>& words) {
  std::string s;
  for (const auto& w : words) s += (s.empty() ? "" : ", ") + w;
  return s;
}

Status bad(const FunctionSpec& spec, std::string_view name, const std::string& text) {
  return {Code::InvalidArgument, spec.name + ": " + printable(name) + ": " + text};
}

// "initial_state.0" is the first part of a pair, which the args struct calls "initial_state".
std::string_view strip_pair(const FunctionSpec& spec, std::string_view name) {
  if (spec.pair_state && name.ends_with(".0")) name.remove_suffix(2);
  return name;
}

}  // namespace

Result<DynamicCall> DynamicCall::make(const Registry& registry, std::string_view function) {
  const Registry::Entry* e = registry.find(function);
  if (e == nullptr)
    return Status(Code::InvalidArgument,
                  "unknown operator '" + printable(function) + "'; nearest: " + join(registry.nearest(function)));
  DynamicCall call;
  call.entry_ = e;
  call.args_ = e->spec.make_args();
  call.lists_ = std::make_shared<Lists>();
  if (e->spec.deprecated) {
    // A function and its backward are one name to a caller, and one warning.
    const Registry::Entry* forward = e->spec.is_backward() ? registry.find(e->spec.forward) : e;
    if (forward == nullptr) forward = e;
    call.warn(forward, forward->spec.name + ": deprecated; use " + e->spec.alias_of);
  }
  return call;
}

Status DynamicCall::set(std::string_view name, const TensorView& t) {
  const FunctionSpec& spec = entry_->spec;
  const ArgSpec* arg = nullptr;
  if (name.starts_with("grad_out.")) {
    const std::string_view of = strip_pair(spec, name.substr(9));
    for (const auto& a : spec.args)
      if (a.role == Role::Upstream && a.of == of) arg = &a;
  } else {
    arg = spec.find_arg(strip_pair(spec, name));
    if (arg != nullptr && arg->role != Role::Input && arg->role != Role::Upstream) arg = nullptr;
  }
  if (arg == nullptr) {
    std::vector<std::string> known;
    for (const auto& a : spec.args) {
      if (a.role == Role::Input || a.role == Role::Upstream)
        known.push_back(a.list() ? a.name_in_files(0) + ", " + a.name_in_files(1) + ".." : a.name_in_files());
    }
    return bad(spec, name, "unknown argument; this function takes " + join(known));
  }
  const std::int64_t element = arg->list() ? element_name(name).element : 0;
  if (element < 0)
    return bad(spec, name, "a list of tensors: name them one by one, " + arg->name_in_files(0) + " the first");
  if (element >= kMostElements)
    return bad(spec, name, "expected at most " + std::to_string(kMostElements) + " tensors");
  const std::string in_files = arg->list() ? arg->name_in_files(static_cast<std::size_t>(element)) : std::string(name);
  name = in_files;
  if (arg->role == Role::Input && name != strip_pair(spec, name)) paired_input_ = true;
  if (name.ends_with(".1")) paired_input_ = true;
  for (const auto& [given, view] : inputs_)
    if (given != name && view && t && strip_pair(spec, given) == strip_pair(spec, name))
      return bad(spec, name, "given beside " + given);
  place(*arg, element) = t;
  const auto old = std::find_if(inputs_.begin(), inputs_.end(), [&](const auto& x) { return x.first == name; });
  if (old != inputs_.end())
    old->second = t;
  else
    inputs_.emplace_back(name, t);
  return {};
}

Status DynamicCall::set_flag(std::string_view name, FlagValue v) {
  const FunctionSpec& spec = entry_->spec;
  const FlagSpec* f = spec.find_flag(name);
  if (f == nullptr) {
    std::vector<std::string> known;
    for (const auto& x : spec.flags) known.push_back(x.name);
    return bad(spec, name, "unknown flag; this function has " + join(known));
  }
  static constexpr const char* kTypes[] = {"a boolean", "an integer", "a number"};
  const auto wrong = [&] {
    return bad(spec, name, std::string("expected ") + kTypes[static_cast<int>(f->type)] + ", got " + to_string(v));
  };
  if (std::holds_alternative<std::monostate>(v)) {
    if (f->required) return wrong();
    if (std::any_of(flags_.begin(), flags_.end(), [&](const SetFlag& x) { return x.flag == name; }))
      return bad(spec, name, "already has a value; none cannot take it back");
    if (!f->takes_none) return {};  // as if not given
  }
  switch (f->type) {
    case FlagSpec::Type::Bool:
      if (!std::holds_alternative<bool>(v)) return wrong();
      break;
    case FlagSpec::Type::Int:
      if (!std::holds_alternative<std::int64_t>(v)) return wrong();
      break;
    case FlagSpec::Type::Float:
      if (const auto* i = std::get_if<std::int64_t>(&v)) v = static_cast<double>(*i);
      if (!std::holds_alternative<double>(v) && !std::holds_alternative<std::monostate>(v)) return wrong();
      break;
  }
  std::string_view stored = name;
  if (!f->retired_for.empty()) {
    stored = f->retired_for;
    warn(f, spec.name + ": " + std::string(name) + " is the old name of " + f->retired_for);
  }
  auto old = std::find_if(flags_.begin(), flags_.end(), [&](const SetFlag& x) { return x.flag == stored; });
  if (old != flags_.end() && old->given_as != name) return bad(spec, name, "given beside " + old->given_as);
  if (f->set) f->set(args_.get(), v);
  if (old != flags_.end())
    old->value = v;
  else
    flags_.push_back({std::string(stored), std::string(name), v});
  return {};
}

void DynamicCall::warn(const void* about, std::string text) {
  if (std::find(warned_about_.begin(), warned_about_.end(), about) != warned_about_.end()) return;
  warned_about_.push_back(about);
  warnings_.push_back(std::move(text));
}

void DynamicCall::log_warnings(const Context& ctx) const {
  for (std::size_t i = 0; i < warnings_.size(); ++i)
    ctx.log_once(warned_about_[i], 0, {LogLevel::Warning, spec().operation, spec().name, "", warnings_[i]});
}

Status DynamicCall::set_flag_text(std::string_view name, std::string_view text) {
  const FlagSpec* f = entry_->spec.find_flag(name);
  if (f == nullptr) return set_flag(name, FlagValue{});  // the same message as for any unknown flag
  const std::string s(text);
  if (f->type == FlagSpec::Type::Bool) {
    if (s == "true" || s == "1") return set_flag(name, true);
    if (s == "false" || s == "0") return set_flag(name, false);
    return bad(entry_->spec, name, "expected true or false, got '" + printable(s) + "'");
  }
  if (s == "none" && !f->required) return set_flag(name, FlagValue{});
  if (f->type == FlagSpec::Type::Int) {
    std::int64_t i = 0;
    const auto [end, err] = std::from_chars(s.data(), s.data() + s.size(), i);
    if (err != std::errc() || end != s.data() + s.size())
      return bad(entry_->spec, name, "expected an integer, got '" + printable(s) + "'");
    return set_flag(name, i);
  }
  char* end = nullptr;
  const double d = std::strtod(s.c_str(), &end);
  if (s.empty() || *end != '\0') return bad(entry_->spec, name, "expected a number, got '" + printable(s) + "'");
  return set_flag(name, d);
}

bool DynamicCall::flag_on(std::string_view name) const {
  for (const auto& x : flags_)
    if (x.flag == name) {
      const bool* b = std::get_if<bool>(&x.value);
      return b != nullptr && *b;
    }
  const FlagSpec* f = entry_->spec.find_flag(name);
  if (f == nullptr) return false;
  const FlagValue v = f->value ? f->value(args_.get()) : f->def;
  const bool* b = std::get_if<bool>(&v);
  return b != nullptr && *b;
}

// The view of an argument; of a list that tensor's, which there are at least as many of afterwards.
TensorView& DynamicCall::place(const ArgSpec& a, std::int64_t element) {
  if (!a.list()) return a.get.views(args_.get()).front();
  std::vector<TensorView>& views = lists_->of[&a];
  const auto i = static_cast<std::size_t>(element);
  if (views.size() <= i) views.resize(i + 1);
  a.get.set_list(args_.get(), views);
  return views[i];
}

std::string DynamicCall::output_name(const ArgSpec& a, std::size_t element) const {
  if (a.list()) return a.name_in_files(element);
  const FunctionSpec& spec = entry_->spec;
  if (a.role == Role::Gradient) {
    const bool first_of_pair = spec.pair_state && paired_input_ && a.of == "initial_state";
    return a.name_in_files() + (first_of_pair ? ".0" : "");
  }
  const bool first_of_pair =
      spec.pair_state && a.name == "final_state" && spec.pair_outputs && spec.pair_outputs(args_.get());
  return a.name_in_files() + (first_of_pair ? ".0" : "");
}

Result<std::vector<DynamicCall::Output>> DynamicCall::outputs(const Context& ctx) {
  if (!ctx.status()) return ctx.status();
  const FunctionSpec& spec = entry_->spec;
  Dims dims;
  Device device;
  if (Status s = check_call(spec, args_.get(), dims, device); !s) return s;
  std::vector<Output> list;
  DType wide = DType::F32;
  for (const auto& a : spec.args)
    if (a.role == Role::Input && a.types == Types::Wide) {
      wide = a.get(args_.get()).dtype;
      break;
    }
  for (const auto& a : spec.args) {
    if (a.role != Role::Output && a.role != Role::Gradient) continue;
    const ArgSpec* of = a.role == Role::Gradient ? spec.find_arg(a.of) : nullptr;
    if (of != nullptr && !of->get(args_.get())) continue;
    const std::size_t count = of != nullptr ? of->get.views(std::as_const(*this).args()).size() : 1;
    if (!a.requested_by.empty() && !flag_on(a.requested_by)) continue;
    if (!spec.has_output(a, args_.get())) continue;
    // Of a pair's second part: only calls that deal in pairs produce it.
    if (a.role == Role::Output && spec.pair_state && a.name.ends_with(".1") && !spec.pair_outputs(args_.get()))
      continue;
    Output o{output_name(a, 0), wide, {}, {}};
    if (!a.starts_as.empty()) o.contents = spec.find_arg(a.starts_as)->get(args_.get());
    if (a.types == Types::Acc) o.dtype = wide == DType::F64 ? DType::F64 : DType::F32;
    if (a.types == Types::Index) o.dtype = DType::I64;
    if (a.types == Types::Like) o.dtype = spec.find_arg(a.like)->get(args_.get()).dtype;
    for (std::size_t i = 0; i < spec.dims_of(a, args_.get()).size(); ++i) {
      o.shape.push_back(dim_value(spec.dim_symbol(a, i, args_.get()), [&](std::string_view s) {
        const auto derived = spec.derived.find(s);
        return dims.has(s) || derived == spec.derived.end() ? dims[s] : derived->second(args_.get(), dims);
      }));
    }
    list.push_back(std::move(o));
    for (std::size_t i = 1; i < count; ++i) {
      list.push_back(list.back());
      list.back().name = output_name(a, i);
    }
  }
  return list;
}

Status DynamicCall::bind(std::string_view output_name_, const TensorView& t) {
  for (const auto& a : entry_->spec.args) {
    if (a.role != Role::Output && a.role != Role::Gradient) continue;
    const ArgSpec* of = a.list() ? entry_->spec.find_arg(a.of) : nullptr;
    const std::size_t count = of != nullptr ? of->get.views(std::as_const(*this).args()).size() : 1;
    for (std::size_t i = 0; i < count; ++i)
      if (output_name(a, i) == output_name_) {
        // The list has as many as that which it is the gradient of: those not bound are absent.
        if (of != nullptr) place(a, static_cast<std::int64_t>(count) - 1);
        place(a, static_cast<std::int64_t>(i)) = t;
        return {};
      }
  }
  return bad(entry_->spec, output_name_, "not an output of this call");
}

Result<DynamicCall> DynamicCall::backward(const Registry& registry) const {
  const FunctionSpec& spec = entry_->spec;
  if (spec.backward.empty()) return Status(Code::Unsupported, spec.name + ": has no backward");
  Result<DynamicCall> b = make(registry, spec.backward);
  if (!b) return b;
  for (const auto& [name, t] : inputs_)
    if (Status s = b->set(name, t); !s) return s;
  for (const auto& x : flags_)
    if (b->spec().find_flag(x.flag) != nullptr)
      if (Status s = b->set_flag(x.flag, x.value); !s) return s;
  return b;
}

}  // namespace fla
