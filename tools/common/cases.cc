#include "tools/common/cases.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fla/registry/registry.h"
#include "tools/common/placement.h"

namespace fla::tools {

// ---- numbers -----------------------------------------------------------------------------------------------------
// Equal on every machine: integer arithmetic, and floating-point sums of products only through std::fma, which rounds
// once everywhere, while a*b+c may or may not be contracted by the compiler.

namespace {

std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

std::uint64_t draw(std::uint64_t stream, std::uint64_t i) { return mix(mix(stream + i * 0x9e3779b97f4a7c15U)); }

// body(begin, end) over [0, n), in threads where that is worth starting them: the inputs of a large benchmark are as
// many numbers as a GPU's memory holds.
template <typename Body>
void in_parts(std::uint64_t n, const Body& body) {
  constexpr std::uint64_t kWorthAThread = 1 << 18;
  const std::uint64_t parts = std::clamp<std::uint64_t>(n / kWorthAThread, 1, std::thread::hardware_concurrency() + 1);
  std::vector<std::jthread> threads;
  for (std::uint64_t i = 1; i < parts; ++i) threads.emplace_back([&, i] { body(n * i / parts, n * (i + 1) / parts); });
  body(0, n / parts);
}

double exp_of_negative(double y) {  // y in [-700, 0]
  const double k = std::floor(std::fma(y, 1.4426950408889634, 0.5));
  double r = std::fma(-k, 0x1.62e42fefa3800p-1, y);
  r = std::fma(-k, 0x1.ef35793c76730p-45, r);
  double p = 1.0;
  for (int n = 14; n >= 1; --n) p = std::fma(p, r / n, 1.0);
  return std::ldexp(p, static_cast<int>(k));
}

}  // namespace

std::uint64_t stream_of(std::uint64_t seed, std::string_view name) {
  std::uint64_t h = 0xcbf29ce484222325U;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return mix(h ^ mix(seed));
}

double uniform(std::uint64_t stream, std::uint64_t i) { return static_cast<double>(draw(stream, i) >> 11) * 0x1p-53; }

double normal(std::uint64_t stream, std::uint64_t i) {
  std::int64_t sum = 0;
  for (std::uint64_t part = 0; part < 3; ++part) {
    const std::uint64_t bits = draw(stream, 3 * i + part);
    for (int j = 0; j < 4; ++j) sum += static_cast<std::int64_t>((bits >> (16 * j)) & 0xffff);
  }
  return static_cast<double>(2 * sum - std::int64_t{12} * 0xffff) *
         0x1p-17;  // twelve uniforms on a grid of 2^-16, mean removed
}

double log_sigmoid(double x) {
  const double z = exp_of_negative(-std::min(std::abs(x), 700.0));
  const double s = z / (2.0 + z), s2 = s * s;  // log1p(z) = 2 atanh(s)
  double p = 0.0;
  for (int n = 31; n >= 1; n -= 2) p = std::fma(p, s2, 1.0 / n);
  return std::fma(-2.0 * s, p, std::min(x, 0.0));
}

const char* name_of(GateRegime r) {
  switch (r) {
    case GateRegime::Plain: return "Plain";
    case GateRegime::Zero: return "Zero";
    case GateRegime::Mild: return "Mild";
    case GateRegime::Strong: return "Strong";
    case GateRegime::Minus40: return "Minus40";
    case GateRegime::Minus316: return "Minus316";
    case GateRegime::Extreme: return "Extreme";
    case GateRegime::ExtremeChannel: return "ExtremeChannel";
  }
  return "?";
}

std::string Outcome::problem() const {
  std::string s = status.ok() ? "" : std::string(fla::name_of(status.code())) + ": " + status.message();
  for (const auto& f : faults) s += (s.empty() ? "" : "; ") + f;
  return s;
}

const TensorView& Outcome::operator[](std::string_view name) const {
  const auto it = tensors.find(name);
  if (it == tensors.end())
    throw std::invalid_argument("no tensor " + std::string(name) + " in this outcome: " + problem());
  return it->second.view();
}

// ---- making a case -----------------------------------------------------------------------------------------------

namespace {

// Levels of a binary hierarchy over T tokens.
std::int64_t levels_for(std::int64_t T) {
  std::int64_t levels = 1;
  while ((std::int64_t{1} << (levels - 1)) < T) ++levels;
  return levels;
}

}  // namespace

Sizes completed(Sizes s, const FunctionSpec& spec) {
  if (s.L > 0) return s;
  for (const ArgSpec& a : spec.args) {
    if (a.count == "L") s.L = 3;
    if (!a.list() && s.L == 0 && std::ranges::count(a.dims, std::string("L")) > 0) s.L = levels_for(s.T);
  }
  return s;
}

std::int64_t size_of_symbol(const Sizes& s, std::string_view symbol) {
  const auto N = s.cu_seqlens.empty() ? s.B : static_cast<std::int64_t>(s.cu_seqlens.size()) - 1;
  if (symbol == "N") return N;
  if (symbol == "P") return s.P > 0 ? s.P : N;
  if (symbol == "B") return s.B;
  if (symbol == "T") return s.T;
  if (symbol == "H") return s.H;
  if (symbol == "HV") return s.HV > 0 ? s.HV : s.H;
  if (symbol == "HQ") return s.HQ > 0 ? s.HQ : s.H;
  if (symbol == "M") return s.M > 0 ? s.M : s.V;
  if (symbol == "L") return s.L > 0 ? s.L : levels_for(s.T);
  if (symbol == "TQ") return s.TQ > 0 ? s.TQ : s.T;
  if (symbol == "Q") return s.TQ > 0 ? s.TQ : std::clamp<std::int64_t>(s.T, 1, 2);
  if (symbol == "K") return s.K;
  if (symbol == "V") return s.V;
  if (symbol == "D") return s.D;
  return -1;
}

std::int64_t axis_size(const Sizes& s, const FunctionSpec& spec, const void* args, std::string_view symbol) {
  return dim_value(symbol, [&](std::string_view leaf) {
    const auto derived = spec.derived.find(leaf);
    if (derived == spec.derived.end()) return size_of_symbol(s, leaf);
    Dims d;
    for (const char* known : {"B", "T", "TQ", "N", "H", "HV", "HQ", "K", "V", "M", "L"})
      d.set(known, size_of_symbol(s, known));
    return derived->second(args, d);
  });
}

namespace {

// Gates that no generator is given for, because plain runs leave them out (gv, g_gamma).
bool is_gate(const ArgSpec& a) {
  return a.gen.log_gate() || (a.gen.kind == Gen::Kind::None && a.name.starts_with('g'));
}
// The running sum of keys that normalised linear attention carries must not make a denominator vanish.
bool is_key_sum(const ArgSpec& a) {
  return a.name.ends_with(".1") || a.name.ends_with("_z") || a.name == "initial_A_state";
}

// Lists of blocks: the query's own first, then earlier ones, every second one of them or so, then -1. Or how many
// entries of a list count, from 1 on.
void make_lists(const FunctionSpec& spec, const std::map<std::string, FlagValue, std::less<>>& flags,
                const Sizes& sizes, bool counts, const TensorView& v, std::uint64_t stream, std::vector<double>& x) {
  const std::shared_ptr<void> args = spec.make_args();
  for (const auto& [name, value] : flags)
    if (const FlagSpec* f = spec.find_flag(name); f != nullptr && f->set) f->set(args.get(), value);
  const std::int64_t n = std::get<std::int64_t>(spec.find_flag("block_size")->value(args.get()));
  const std::int64_t slots = axis_size(sizes, spec, args.get(), "S");
  const auto width = static_cast<std::size_t>(counts ? 1 : slots);
  for (std::size_t list = 0; list * width < x.size(); ++list) {
    const std::int64_t query = static_cast<std::int64_t>(list) / v.dim(2) % v.dim(1);
    std::int64_t begin = 0;
    for (const std::int64_t b : sizes.cu_seqlens) begin = b <= query ? b : begin;
    const std::int64_t own = (query - begin + sizes.T - v.dim(1)) / n;
    if (counts) {
      x[list] = static_cast<double>(1 + static_cast<std::int64_t>(uniform(stream, list) * static_cast<double>(slots)));
      continue;
    }
    std::int64_t block = own;
    for (std::size_t s = 0; s < width; ++s) {
      x[list * width + s] = static_cast<double>(std::max<std::int64_t>(block, -1));
      block -= uniform(stream, list * width + s) < 0.5 ? 1 : 2;
    }
  }
}

const Context& any_context() {
  static const Context ctx({.threads = 1});
  return ctx;
}

}  // namespace

Result<Case> Case::make(const Registry& registry, std::string_view function, const Sizes& sizes,
                        const CaseOptions& options) {
  const Registry::Entry* e = registry.find(function);
  if (e == nullptr || e->spec.is_backward()) {
    std::string near;
    for (const auto& n : registry.nearest(function)) near += (near.empty() ? "" : ", ") + n;
    return Status(Code::InvalidArgument, "unknown operator '" + std::string(function) + "'; nearest: " + near);
  }
  Case c;
  c.registry_ = &registry;
  c.spec_ = &e->spec;
  c.sizes_ = sizes;
  c.options_ = options;
  const ArgSpec* boundaries = c.spec_->find_arg("cu_seqlens");
  if (c.sizes_.cu_seqlens.empty() && boundaries != nullptr && boundaries->required)
    for (std::int64_t n = 0; n <= std::max<std::int64_t>(sizes.B, 1); ++n)
      c.sizes_.cu_seqlens.push_back(sizes.B > 0 ? n * sizes.T : 0);
  if (!c.sizes_.cu_seqlens.empty()) {
    c.sizes_.B = 1;
    c.sizes_.T = c.sizes_.cu_seqlens.back();
  }
  for (const auto& [name, v] : c.spec_->bench_flags) c.flags_[name] = v;
  c.sizes_ = completed(std::move(c.sizes_), *c.spec_);  // a part of the tokens has the levels of all
  for (const auto& a : c.spec_->args) {
    if (a.role != Role::Input) continue;
    const bool packed = a.name == "cu_seqlens" && !c.sizes_.cu_seqlens.empty();
    if (packed || a.required || a.name == "block_indices" || (a.types != Types::Index && a.gen.by_default()))
      for (const std::string& name : c.names_of(a)) c.inputs_.emplace(name, c.generate(a, name));
  }
  if (!sizes.cu_seqlens.empty() && c.spec_->find_arg("cu_seqlens") == nullptr)
    return Status(Code::InvalidArgument, c.spec_->name + ": cu_seqlens: this function takes no packed sequences");
  return c;
}

Case make_case(std::string_view function, const Sizes& sizes, const CaseOptions& options) {
  Sizes fitting = sizes;
  if (const Registry::Entry* e = Registry::global().find(function); e != nullptr)
    for (const auto& [symbol, most] : e->spec.max_dim) {
      if (symbol == "T") fitting.T = std::min(fitting.T, most);
      if (symbol == "K" && most > 0) fitting.K = std::min(fitting.K, most);
    }
  Result<Case> c = Case::make(Registry::global(), function, fitting, options);
  if (!c) throw std::invalid_argument(c.status().message());
  return std::move(*c);
}

std::string Case::text() const {
  std::string s = spec_->name + " " + fla::name_of(options_.dtype) + " ";
  if (std::ranges::any_of(spec_->args, [](const ArgSpec& a) { return std::ranges::count(a.dims, "D") > 0; })) {
    s += "B=" + std::to_string(sizes_.B) + " T=" + std::to_string(sizes_.T) + " D=" + std::to_string(sizes_.D) +
         (sizes_.L > 0 ? " L=" + std::to_string(sizes_.L) : "");
  } else {
    s += "B=" + std::to_string(sizes_.B) + " T=" + std::to_string(sizes_.T) + " H=" + std::to_string(sizes_.H) +
         (sizes_.HV > 0 ? " HV=" + std::to_string(sizes_.HV) : "") +
         (sizes_.HQ > 0 ? " HQ=" + std::to_string(sizes_.HQ) : "") +
         (sizes_.TQ > 0 ? " TQ=" + std::to_string(sizes_.TQ) : "") +
         (sizes_.M > 0 ? " M=" + std::to_string(sizes_.M) : "") +
         (sizes_.L > 0 ? " L=" + std::to_string(sizes_.L) : "") + " K=" + std::to_string(sizes_.K) +
         " V=" + std::to_string(sizes_.V);
  }
  if (!sizes_.cu_seqlens.empty()) s += " cu_seqlens=" + shape_string(sizes_.cu_seqlens);
  s += std::string(" gate=") + name_of(options_.regime) + " inputs=";
  for (const auto& [name, t] : inputs_) s += name + ",";
  for (const auto& [name, v] : flags_) s += " " + name + "=" + to_string(v);
  return s;
}

bool Case::takes(std::string_view argument) const {
  const ArgSpec* a = spec_->find_arg(argument);
  return a != nullptr && a->role == Role::Input;
}

std::vector<std::string> Case::input_names() const {
  std::vector<std::string> names;
  for (const auto& [name, t] : inputs_) names.push_back(name);
  return names;
}

std::vector<std::string> Case::upstream_names() const {
  std::vector<std::string> names;
  for (const auto& [name, t] : upstream_) names.push_back(name);
  return names;
}

std::vector<std::string> Case::names_of(const ArgSpec& a) const {
  if (!a.list()) return {a.name};
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < size_of_symbol(sizes_, a.count); ++i)
    names.push_back(a.name_in_files(static_cast<std::size_t>(i)));
  return names;
}

const ArgSpec* Case::require(std::string_view input) const {
  if (!takes(input)) throw std::invalid_argument(spec_->name + " has no input " + std::string(input));
  return spec_->find_arg(input);
}

Shape Case::shape_of(const ArgSpec& a, const FunctionSpec& spec) const {
  const std::shared_ptr<void> args = spec.make_args();
  for (const auto& [name, v] : flags_)
    if (const FlagSpec* f = spec.find_flag(name); f != nullptr && f->set && !std::holds_alternative<std::monostate>(v))
      f->set(args.get(), v);
  // A size may follow from the boundaries, as the number of blocks does.
  const ArgSpec* boundaries = spec.find_arg("cu_seqlens");
  if (boundaries != nullptr && !sizes_.cu_seqlens.empty() && !spec.is_backward())
    boundaries->get.views(args.get()).front() = {sizes_.cu_seqlens.data(),
                                                 {static_cast<std::int64_t>(sizes_.cu_seqlens.size())}};
  Shape s;
  for (std::size_t i = 0; i < a.dims.size(); ++i) {
    const std::string& symbol = spec.dim_symbol(a, i, args.get());
    s.push_back(axis_size(sizes_, spec, args.get(), symbol));
    if (s.back() < 0) throw std::invalid_argument("Case: no size for dimension " + symbol + " of " + a.name);
  }
  return s;
}

DType Case::type_of(const ArgSpec& a) const {
  const DType narrow = options_.dtype == DType::F64 ? DType::F64 : DType::F32;
  switch (a.types) {
    case Types::Wide: return options_.dtype;
    case Types::Float:
    case Types::Acc: return narrow;
    case Types::Like: return type_of(*spec_->find_arg(a.like));
    case Types::Index: return sizes_.index;
  }
  return narrow;
}

Case::Tensor Case::generate(const ArgSpec& a, const std::string& stream_name) const {
  Buffer b(type_of(a), shape_of(a, *spec_));
  const TensorView v = b.view();
  const std::uint64_t stream = stream_of(options_.seed, stream_name);
  const auto n = static_cast<std::uint64_t>(v.numel());
  std::vector<double> x(n);

  if (a.name == "block_indices" || a.name == "block_counts") {
    make_lists(*spec_, flags_, sizes_, a.name == "block_counts", v, stream, x);
  } else if (a.types == Types::Index && a.name == "past_tokens") {
    // As many as the levels have room for beside the longest sequence, and fewer for every later one.
    std::int64_t longest = sizes_.T;
    if (!sizes_.cu_seqlens.empty()) {
      longest = 0;
      for (std::size_t i = 1; i < sizes_.cu_seqlens.size(); ++i)
        longest = std::max(longest, sizes_.cu_seqlens[i] - sizes_.cu_seqlens[i - 1]);
    }
    const std::int64_t room = (std::int64_t{1} << (size_of_symbol(sizes_, "L") - 1)) - longest;
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<double>(std::max<std::int64_t>(room - 3 * static_cast<std::int64_t>(i), 0));
  } else if (a.types == Types::Index) {
    if (sizes_.cu_seqlens.empty())
      throw std::invalid_argument(spec_->name + ": " + a.name + " needs Sizes::cu_seqlens");
    std::ranges::transform(sizes_.cu_seqlens, x.begin(), [](std::int64_t i) { return static_cast<double>(i); });
  } else if (is_gate(a)) {
    // One channel: of the last axis, which is the head axis where the gate has no other.
    const auto channels = static_cast<std::uint64_t>(std::max<std::int64_t>(v.ndim > 0 ? v.dim(v.ndim - 1) : 1, 1));
    in_parts(n, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i) {
        const double u = uniform(stream, i);
        double g = 0.0;
        if (a.gen.kind == Gen::Kind::NegUniform)
          g = std::max(a.gen.min, -1e4) * u;
        else if (a.gen.kind == Gen::Kind::None && a.dims == std::vector<std::string>{"H"})
          g = -0.5 * u;
        else
          g = std::max(log_sigmoid(normal(stream, i)), a.gen.min);
        switch (options_.regime) {
          case GateRegime::Plain: break;
          case GateRegime::Zero: g = 0.0; break;
          case GateRegime::Mild: g = -0.01; break;
          case GateRegime::Strong: g = -5.0; break;
          case GateRegime::Minus40: g = -40.0; break;
          case GateRegime::Minus316: g = -316.0; break;
          case GateRegime::Extreme: g = u < 0.5 ? -1000.0 : u < 0.75 ? 0.0 : -0.3; break;
          case GateRegime::ExtremeChannel:
            if (i % channels == 0) g = -1000.0;
            break;
        }
        x[i] = g;
      }
    });
  } else {
    std::vector<double> other;
    if (a.gen.kind == Gen::Kind::Against) other = values(generate(*spec_->find_arg(a.gen.of), a.gen.of).view);
    const Gen::Kind kind = a.gen.kind == Gen::Kind::None && is_key_sum(a) ? Gen::Kind::AbsNormal : a.gen.kind;
    const auto width = static_cast<std::uint64_t>(v.ndim > 0 ? v.dim(v.ndim - 1) : 1);
    in_parts(n, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i) {
        const double z = normal(stream, i);
        switch (kind) {
          case Gen::Kind::AbsNormal: x[i] = a.gen.scale * (std::abs(z) + 0x1p-7); break;
          case Gen::Kind::Sigmoid: x[i] = exp_of_negative(log_sigmoid(z)); break;
          case Gen::Kind::NegUniform: x[i] = std::max(a.gen.min, -1e4) * uniform(stream, i); break;
          case Gen::Kind::Against: x[i] = -uniform(stream, i / width) * other[i]; break;
          default: x[i] = a.gen.scale * z; break;
        }
      }
    });
    if (kind == Gen::Kind::UnitRows && width > 0)
      for (std::uint64_t row = 0; row + width <= n; row += width) {
        double sum = 0.0;
        for (std::uint64_t i = row; i < row + width; ++i) sum = std::fma(x[i], x[i], sum);
        const double norm = std::sqrt(sum);
        if (norm > 0.0)
          for (std::uint64_t i = row; i < row + width; ++i) x[i] /= norm;
      }
    if (kind == Gen::Kind::Moment && width > 0) {
      const std::vector<double> root = x;
      for (std::uint64_t i = 0; i < n; ++i) {
        const std::uint64_t row = i / width, column = row - row % width + i % width;
        x[i] = 0.0;
        for (std::uint64_t j = 0; j < width; ++j) x[i] += root[row * width + j] * root[column * width + j];
        x[i] /= static_cast<double>(width);
      }
    }
  }
  if (options_.bf16_exact && a.types != Types::Index)
    for (double& e : x) e = to_float(to_bf16(static_cast<float>(e)));
  assign(v, x);
  auto buffer = std::make_shared<const Buffer>(std::move(b));
  return {v, buffer, buffer};
}

// ---- changed copies ----------------------------------------------------------------------------------------------

namespace {

template <typename Tensor>
Tensor own(Buffer b) {
  auto buffer = std::make_shared<const Buffer>(std::move(b));
  return Tensor{buffer->view(), buffer, buffer};
}

}  // namespace

Case Case::with(std::string_view input) const {
  Case c = *this;
  const ArgSpec& a = *require(input);
  const bool all = a.name == input;
  for (const std::string& name : all ? names_of(a) : std::vector{std::string(input)})
    c.inputs_.insert_or_assign(name, generate(a, name));
  return c;
}

Case Case::with(std::string_view input, const TensorView& contents) const {
  require(input);
  Case c = *this;
  c.inputs_.insert_or_assign(std::string(input), own<Tensor>(clone(contents)));
  return c;
}

Case Case::with_view(std::string_view input, const TensorView& view, std::shared_ptr<const void> owner) const {
  require(input);
  Case c = *this;
  c.inputs_.insert_or_assign(std::string(input), Tensor{view, std::move(owner), nullptr});
  return c;
}

Case Case::without(std::string_view input) const {
  const ArgSpec* a = require(input);
  Case c = *this;
  std::erase_if(c.inputs_,
                [&](const auto& x) { return x.first == input || (a->name == input && spec_->find_arg(x.first) == a); });
  return c;
}

Case Case::fill(std::string_view input, double x) const {
  const ArgSpec* a = require(input);
  const auto it = inputs_.find(input);
  Buffer b(it != inputs_.end() ? it->second.view.dtype : type_of(*a), shape_of(*a, *spec_));
  tools::fill(b.view(), x);
  Case c = *this;
  c.inputs_.insert_or_assign(std::string(input), own<Tensor>(std::move(b)));
  return c;
}

Case Case::cast(std::string_view input, DType t) const {
  return with(input, tools::cast(this->input(input), t).view());
}

Case Case::layout(std::string_view input, const Layout& l) const {
  const TensorView& from = this->input(input);
  Buffer b(from.dtype, {from.dims().begin(), from.dims().end()}, Fill::Poison, l);
  assign(b.view(), values(from));
  Case c = *this;
  c.inputs_.insert_or_assign(std::string(input), own<Tensor>(std::move(b)));
  return c;
}

Case Case::expand(std::string_view input, int axis) const {
  Case c = *this;
  Tensor& t = c.inputs_.at(std::string(input));
  t.view.stride[static_cast<std::size_t>(axis)] = 0;
  return c;
}

Case Case::flag(std::string_view name, FlagValue v) const {
  if (!has_flag(name)) throw std::invalid_argument(spec_->name + " has no flag " + std::string(name));
  Case c = *this;
  c.flags_.insert_or_assign(std::string(name), v);
  // A flag that swaps a state's axes, under its present or its old name: the same numbers in the other layout.
  const FlagSpec* f = spec_->find_flag(name);
  const std::string_view swaps = f->retired_for.empty() ? name : std::string_view(f->retired_for);
  for (auto& [input, t] : c.inputs_) {
    const ArgSpec* a = spec_->find_arg(input);
    if (a->swapped_by != swaps || c.shape_of(*a, *spec_) == Shape(t.view.dims().begin(), t.view.dims().end())) continue;
    TensorView swapped = t.view;
    const auto n = static_cast<std::size_t>(swapped.ndim);
    std::swap(swapped.shape[n - 1], swapped.shape[n - 2]);
    std::swap(swapped.stride[n - 1], swapped.stride[n - 2]);
    t = own<Tensor>(clone(swapped));
  }
  return c;
}

Case Case::without_flag(std::string_view name) const {
  Case c = *this;
  if (const auto it = c.flags_.find(name); it != c.flags_.end()) c.flags_.erase(it);
  return c;
}

Case Case::as(std::string_view function, const std::map<std::string, std::string>& rename) const {
  const Registry::Entry* e = registry_->find(function);
  if (e == nullptr) throw std::invalid_argument("unknown operator " + std::string(function));
  Case c = *this;
  c.spec_ = &e->spec;
  c.inputs_.clear();
  for (const auto& [name, t] : inputs_) {
    const auto it = rename.find(name);
    const std::string& to = it == rename.end() ? name : it->second;
    c.require(to);
    c.inputs_.emplace(to, t);
  }
  c.flags_.clear();
  for (const auto& [name, v] : e->spec.bench_flags) c.flags_[name] = v;
  for (const auto& [name, v] : flags_) {
    if (!c.has_flag(name)) throw std::invalid_argument(e->spec.name + " has no flag " + name);
    c.flags_[name] = v;
  }
  return c;
}

Case Case::widen(DType to) const {
  Case c = *this;
  c.upstream_ = upstreams();
  for (auto* group : {&c.inputs_, &c.upstream_})
    for (auto& [name, t] : *group)
      if (is_float(t.view.dtype)) t = own<Tensor>(tools::cast(t.view, to));
  c.options_.dtype = to;
  return c;
}

std::int64_t Case::rows_of(const ArgSpec& a, std::size_t axis, std::string_view symbol) const {
  std::int64_t rows = 1;
  bool found = false;
  for (std::string_view left = a.dims[axis]; !left.empty();) {
    const std::size_t end = std::min(left.find('*'), left.size());
    const std::string_view factor = left.substr(0, end);
    left.remove_prefix(std::min(end + 1, left.size()));
    const bool queries = factor == "TQ" && symbol == "T" && size_of_symbol(sizes_, factor) == sizes_.T;
    if (factor == symbol || queries) {
      found = true;
    } else if ((factor == "HV" || factor == "HQ") && symbol == "H") {
      found = true;
      rows *= sizes_.H > 0 ? size_of_symbol(sizes_, factor) / sizes_.H : 1;
    } else {
      const std::shared_ptr<void> args = spec_->make_args();
      for (const auto& [name, v] : flags_)
        if (const FlagSpec* f = spec_->find_flag(name); f != nullptr && f->set) f->set(args.get(), v);
      rows *= axis_size(sizes_, *spec_, args.get(), factor);
    }
  }
  return found ? rows : 0;
}

Case Case::select(const std::map<std::string, std::pair<std::int64_t, std::int64_t>>& ranges) const {
  Case c = *this;
  c.upstream_ = upstreams();
  // A size that follows from the tokens, as the number of blocks does, of `T` tokens or of boundaries.
  const auto derived = [&](const std::string& symbol, std::int64_t T, std::vector<std::int64_t> cu_seqlens) {
    Sizes s = sizes_;
    s.T = T;
    s.cu_seqlens = std::move(cu_seqlens);
    const std::shared_ptr<void> args = spec_->make_args();
    for (const auto& [name, v] : flags_)
      if (const FlagSpec* f = spec_->find_flag(name); f != nullptr && f->set) f->set(args.get(), v);
    if (const ArgSpec* b = spec_->find_arg("cu_seqlens"); b != nullptr && !s.cu_seqlens.empty())
      b->get.views(args.get()).front() = {s.cu_seqlens.data(), {static_cast<std::int64_t>(s.cu_seqlens.size())}};
    return axis_size(s, *spec_, args.get(), symbol);
  };
  const auto cut = [&](const ArgSpec& a, Tensor& t) {
    const auto tokens = ranges.find("T");
    for (std::size_t i = 0; tokens != ranges.end() && i < a.dims.size(); ++i) {
      if (!spec_->derived.contains(a.dims[i]) || derived(a.dims[i], 0, {}) != 0) continue;
      std::vector<std::int64_t> before = sizes_.cu_seqlens;
      std::erase_if(before, [&](std::int64_t b) { return b > tokens->second.first; });
      const std::int64_t begin =
          before.size() > 1 ? derived(a.dims[i], before.back(), before) : derived(a.dims[i], tokens->second.first, {});
      t.view = slice(t.view, static_cast<int>(i), begin, derived(a.dims[i], tokens->second.second, {}));
    }
    for (std::size_t i = 0; i < a.dims.size(); ++i)
      for (const auto& [symbol, r] : ranges)
        if (const std::int64_t rows = rows_of(a, i, symbol); rows > 0)
          t.view = slice(t.view, static_cast<int>(i), rows * r.first, rows * r.second);
  };
  for (auto& [name, t] : c.inputs_) cut(*spec_->find_arg(name), t);
  for (auto& [name, t] : c.upstream_) cut(*spec_->find_arg(name), t);
  for (const auto& [name, r] : ranges) {
    if (name == "T") c.sizes_.T = r.second;
    if (name == "H") {
      if (c.sizes_.HV > 0) c.sizes_.HV = r.second * (sizes_.HV / sizes_.H);
      if (c.sizes_.HQ > 0) c.sizes_.HQ = r.second * (sizes_.HQ / sizes_.H);
      c.sizes_.H = r.second;
    }
    if (name == "B") c.sizes_.B = r.second;
  }
  return c;
}

Case Case::tokens(std::int64_t begin, std::int64_t end) const {
  if (!sizes_.cu_seqlens.empty()) throw std::invalid_argument("Case::tokens: packed");
  return select({{"T", {begin, end - begin}}});
}

Case Case::head(std::int64_t h) const { return select({{"H", {h, 1}}}); }

Case Case::sequence(std::int64_t n) const {
  if (sizes_.cu_seqlens.empty()) return select({{"B", {n, 1}}, {"N", {n, 1}}, {"P", {n, 1}}});
  const auto i = static_cast<std::size_t>(n);
  const std::int64_t begin = sizes_.cu_seqlens[i], end = sizes_.cu_seqlens[i + 1];
  Case c = select({{"T", {begin, end - begin}}, {"N", {n, 1}}, {"P", {n, 1}}});
  c.sizes_.cu_seqlens.clear();
  if (spec_->find_arg("cu_seqlens")->required) {
    c.sizes_.cu_seqlens = {0, end - begin};
    return c.with("cu_seqlens");
  }
  for (const char* index : {"cu_seqlens", "cu_seqlens_cpu"})
    if (c.takes(index)) c = c.without(index);
  return c;
}

Case Case::with_upstream(std::string_view output, const TensorView& contents) const {
  Case c = *this;
  c.upstream_.insert_or_assign(std::string(output), own<Tensor>(clone(contents)));
  std::erase(c.no_upstream_, output);
  return c;
}

Case Case::without_upstream(std::string_view output) const {
  Case c = *this;
  if (const auto it = c.upstream_.find(output); it != c.upstream_.end()) c.upstream_.erase(it);
  c.no_upstream_.emplace_back(output);
  return c;
}

// ---- running -----------------------------------------------------------------------------------------------------

// Whether a run should ask for what this flag asks for. Scores of T x T are for dense, short calls.
bool Case::wants_output(const FlagSpec& f) const {
  if (f.set || flags_.contains(f.name)) return false;
  if (!f.excludes.empty()) {
    const auto other = flags_.find(f.excludes);
    if (other != flags_.end() && other->second == FlagValue{true}) return false;
  }
  for (const auto& a : spec_->args)
    if (a.requested_by == f.name && std::ranges::count(a.dims, "T") > 1 &&
        (!sizes_.cu_seqlens.empty() || sizes_.T > 512))
      return false;
  return true;
}

Result<DynamicCall> Case::call() const {
  Result<DynamicCall> call = DynamicCall::make(*registry_, spec_->name);
  if (!call) return call;
  for (const auto& [name, v] : flags_)
    if (Status s = call->set_flag(name, v); !s) return s;
  for (const auto& f : spec_->flags)
    if (wants_output(f))
      if (Status s = call->set_flag(f.name, true); !s) return s;
  for (const auto& [name, t] : inputs_)
    if (Status s = call->set(name, t.view); !s) return s;
  return call;
}

std::map<std::string, Case::Tensor, std::less<>> Case::upstreams() const {
  std::map<std::string, Tensor, std::less<>> all = upstream_;
  const Registry::Entry* backward = registry_->find(spec_->backward);
  if (backward == nullptr) return all;
  Result<DynamicCall> forward = call();
  if (!forward) return all;
  Result<std::vector<DynamicCall::Output>> outputs = forward->outputs(any_context());
  if (!outputs) return all;
  for (const auto& a : backward->spec.args) {
    if (a.role != Role::Upstream || all.contains(a.of) || std::ranges::count(no_upstream_, a.of) > 0) continue;
    const auto o = std::ranges::find_if(
        *outputs, [&](const auto& x) { return x.name == "out." + a.of || x.name == "out." + a.of + ".0"; });
    if (o == outputs->end()) continue;
    Buffer b(o->dtype, o->shape);
    std::vector<double> x(static_cast<std::size_t>(b.numel()));
    const std::uint64_t stream = stream_of(options_.seed, "grad_out." + a.of);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = normal(stream, i);
    if (options_.bf16_exact)
      for (double& e : x) e = to_float(to_bf16(static_cast<float>(e)));
    assign(b.view(), x);
    all.emplace(a.of, own<Tensor>(std::move(b)));
  }
  return all;
}

Case Case::prepared() const {
  Case c = *this;
  c.upstream_ = upstreams();
  return c;
}

Result<DynamicCall> Case::backward_call() const {
  Result<DynamicCall> forward = call();
  if (!forward) return forward;
  Result<DynamicCall> backward = forward->backward(*registry_);
  if (!backward) return backward;
  for (const auto& [of, t] : upstream_)
    if (Status s = backward->set("grad_out." + of, t.view); !s) return s;
  return backward;
}

Outcome Case::execute(const Context& ctx, DynamicCall& call, const RunOptions& o) const {
  Outcome out;
  Result<std::vector<DynamicCall::Output>> outputs = call.outputs(ctx);
  if (!outputs) {
    out.status = outputs.status();
    return out;
  }
  std::deque<Buffer> scratch;
  for (const auto& x : *outputs) {
    const bool wanted = o.only.empty() || std::ranges::count(o.only, x.name) > 0;
    const std::string before = x.name == "out.final_state" || x.name == "out.final_state.0" ? "initial_state"
                               : x.name == "out.final_state.1"                              ? "initial_state.1"
                                                                                            : "";
    const bool final_state = has(before);
    const bool pool = x.contents.present();
    if (pool ? !wanted || o.state_in_place : wanted && final_state && o.state_in_place) {
      // The call writes where it reads: a copy, for the case's inputs are shared.
      const std::string from = pool ? call.spec().find_arg(x.name.substr(4))->starts_as : before;
      Buffer state = clone(input(from));
      if (out.status = call.set(from, state.view()); !out.status) return out;
      if (wanted) {
        out.tensors.emplace(x.name, std::move(state));
      } else {
        scratch.push_back(std::move(state));
      }
      if (pool) continue;
    }
    if (!wanted) continue;
    if (!out.tensors.contains(x.name)) {
      Buffer b(x.dtype, x.shape, Fill::Poison, o.outputs);
      if (x.contents) assign(b.view(), values(x.contents));
      out.tensors.emplace(x.name, std::move(b));
    }
    if (out.status = call.bind(x.name, out.tensors.at(x.name).view()); !out.status) return out;
  }
  std::map<const Buffer*, std::pair<std::string, std::uint64_t>> before;
  for (const auto& [name, t] : inputs_)
    if (t.buffer) before.emplace(t.buffer.get(), std::pair{name, t.buffer->checksum()});

  Executed x = tools::execute(ctx, call, o.device.value_or(device_of(ctx)), o.workspace_offset);
  out.status = std::move(x.status);
  out.workspace_bytes = x.workspace_bytes;
  out.backend = x.route.backend;
  out.kernel = x.route.kernel;
  for (const auto& [name, b] : out.tensors)
    if (!b.guards_intact()) out.faults.push_back(name + ": written outside the tensor");
  std::move(x.faults.begin(), x.faults.end(), std::back_inserter(out.faults));
  for (const auto& [buffer, was] : before)
    if (buffer->checksum() != was.second) out.faults.push_back(was.first + ": an input was written to");
  return out;
}

Outcome Case::run(const Context& ctx, const RunOptions& o) const {
  Result<DynamicCall> c = call();
  if (!c) {
    Outcome out;
    out.status = c.status();
    return out;
  }
  return execute(ctx, *c, o);
}

Outcome Case::run_backward(const Context& ctx, const RunOptions& o) const {
  if (spec_->backward.empty()) {
    Outcome none;
    none.no_such_pass = true;
    return none;
  }
  const Case c = prepared();
  Result<DynamicCall> b = c.backward_call();
  if (!b) {
    Outcome out;
    out.status = b.status();
    return out;
  }
  return c.execute(ctx, *b, o);
}

}  // namespace fla::tools
