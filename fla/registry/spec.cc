#include "fla/registry/spec.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "fla/core/index_table.h"
#include "fla/registry/observe.h"

namespace fla {

std::string to_string(const FlagValue& v) {
  if (const auto* b = std::get_if<bool>(&v)) return *b ? "true" : "false";
  if (const auto* i = std::get_if<std::int64_t>(&v)) return std::to_string(*i);
  if (const auto* d = std::get_if<double>(&v)) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", *d);
    return text;
  }
  return "none";
}

std::string ArgSpec::name_in_files() const {
  switch (role) {
    case Role::Input: return name;
    case Role::Output: return "out." + name;
    case Role::Upstream: return "grad_out." + of;
    case Role::Gradient: return "grad." + of;
  }
  return name;
}

std::string ArgSpec::name_in_files(std::size_t element) const {
  return list() ? name_in_files() + "." + std::to_string(element) : name_in_files();
}

std::string ArgSpec::name_of(std::size_t element) const {
  return list() ? name + "[" + std::to_string(element) + "]" : name;
}

ElementName element_name(std::string_view name) {
  std::string_view digits = name;
  const bool brackets = digits.ends_with(']');
  if (brackets) digits.remove_suffix(1);
  const std::size_t at = digits.rfind(brackets ? '[' : '.');
  if (at == std::string_view::npos) return {name};
  digits.remove_prefix(at + 1);
  std::int64_t element = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9' || element > kMostElements) return {name};
    element = 10 * element + (c - '0');
  }
  if (digits.empty() || (digits.size() > 1 && digits[0] == '0')) return {name};
  return {name.substr(0, at), element};
}

std::string FlagSpec::limits() const {
  const bool least = min > -1e300, most = max < 1e300;
  if (!least && !most) return "";
  if (!least) return "at most " + to_string(FlagValue{max});
  if (!most) return "at least " + to_string(FlagValue{min});
  return to_string(FlagValue{min}) + (min < max ? " to " + to_string(FlagValue{max}) : "");
}

const ArgSpec* FunctionSpec::find_arg(std::string_view n) const {
  for (const auto& a : args)
    if (a.name == n) return &a;
  const auto [list, element] = element_name(n);
  if (element < 0) return nullptr;
  for (const auto& a : args)
    if (a.list() && a.name == list) return &a;
  return nullptr;
}

const FlagSpec* FunctionSpec::find_flag(std::string_view n) const {
  for (const auto& f : flags)
    if (f.name == n) return &f;
  return nullptr;
}

double FunctionSpec::tolerance_of(std::string_view tensor) const {
  auto it = tolerance.find(std::string(tensor));
  if (it == tolerance.end()) it = tolerance.find("");
  return it == tolerance.end() ? 0.005 : it->second;
}

bool FunctionSpec::written_in_place(const ArgSpec& input, const void* call) const {
  if (input.role != Role::Input) return false;
  for (const auto& a : args)
    if (!a.starts_as.empty() && a.starts_as == input.name && has_output(a, call)) return !a.get(call);
  return false;
}

const std::vector<std::string>& FunctionSpec::dims_of(const ArgSpec& a, const void* call) const {
  if (a.other_dims.empty()) return a.dims;
  if (!a.shaped_as.empty()) {
    const ArgSpec& by = *find_arg(a.shaped_as);
    const std::vector<std::string>& shape = dims_of(by, call);
    for (std::size_t i = 0; i < by.other_dims.size(); ++i)
      if (&shape == &by.other_dims[i]) return a.other_dims[i];
    return a.dims;
  }
  const ArgSpec* shaped = a.role == Role::Gradient ? find_arg(a.of) : &a;
  if (shaped == nullptr) shaped = &a;
  const TensorView& t = shaped->get(call);
  for (const auto& other : a.other_dims)
    if (static_cast<int>(other.size()) == t.ndim) return other;
  return a.dims;
}

const std::string& FunctionSpec::dim_symbol(const ArgSpec& a, std::size_t axis, const void* call) const {
  const std::vector<std::string>& dims = dims_of(a, call);
  if (!a.swapped_by.empty() && axis + 2 >= dims.size()) {
    const FlagSpec* f = find_flag(a.swapped_by);
    if (f != nullptr && std::get<bool>(f->value(call))) return dims[2 * dims.size() - 3 - axis];
  }
  return dims[axis];
}

namespace {

struct Checker {
  const FunctionSpec& spec;
  const void* args;
  Dims& dims;
  Device& device;
  const ArgSpec* wide = nullptr;  // the argument that fixed the wide type
  DType wide_type = DType::F32;
  const ArgSpec* first = nullptr;
  std::size_t element = 0;          // the tensor of a list that is looked at
  const ArgSpec* packed = nullptr;  // the boundaries that fixed the number of sequences

  Status bad(const std::string& arg, const std::string& text) const {
    return {Code::InvalidArgument, spec.name + ": " + arg + ": " + text};
  }
  Status bad(const ArgSpec& a, const std::string& text) const { return bad(a.name_of(element), text); }

  const TensorView& view(const ArgSpec& a) const { return a.get(args); }

  std::string expected_shape(const ArgSpec& a, const TensorView& t) const {
    std::string symbols, numbers;
    for (std::size_t i = 0; i < spec.dims_of(a, args).size(); ++i) {
      const std::string& symbol = spec.dim_symbol(a, i, args);
      const std::int64_t want = symbol_value(symbol);
      symbols += (i != 0 ? "," : "") + symbol;
      numbers += (i != 0 ? "," : "") + (want >= 0 ? std::to_string(want) : symbol);
    }
    return "expected shape [" + numbers + "] ([" + symbols + "]" +
           (first != nullptr && first != &a ? ", sizes as in " + first->name_of(0) : std::string()) + "), got " +
           shape_string(t.dims());
  }

  std::int64_t symbol_value(const std::string& symbol) const {
    return dim_value(symbol, [&](std::string_view s) {
      std::int64_t value = dims[s];
      if (value >= 0 || spec.derived.empty()) return value;
      const auto it = spec.derived.find(s);
      if (it == spec.derived.end()) return value;
      value = it->second(args, dims);
      if (value >= 0) dims.set(it->first, value);
      return value >= 0 ? value : std::int64_t{-1};
    });
  }

  Status memory(const ArgSpec& a, const TensorView& t) const {
    std::int64_t bytes = static_cast<std::int64_t>(size_of(t.dtype));
    std::int64_t lo = 0, hi = 0;
    for (int i = 0; i < t.ndim; ++i) {
      const std::int64_t n = t.dim(i), s = t.stride[static_cast<std::size_t>(i)];
      if (n < 0) return bad(a, "negative size in " + shape_string(t.dims()));
      std::int64_t reach = 0;
      if (__builtin_mul_overflow(bytes, n > 0 ? n : 1, &bytes) ||
          __builtin_mul_overflow(n > 0 ? n - 1 : 0, s, &reach) ||
          __builtin_mul_overflow(reach, std::int64_t{8}, &reach) ||
          __builtin_add_overflow(reach > 0 ? hi : lo, reach, reach > 0 ? &hi : &lo))
        return bad(a, "size or stride overflows 64 bits: shape " + shape_string(t.dims()) + ", strides " +
                          shape_string({t.stride.data(), static_cast<std::size_t>(t.ndim)}));
    }
    if (t.data == nullptr && t.numel() > 0) return bad(a, "data pointer is null, shape " + shape_string(t.dims()));
    if (reinterpret_cast<std::uintptr_t>(t.data) % size_of(t.dtype) != 0)
      return bad(a, "data pointer is not aligned to its " + std::to_string(size_of(t.dtype)) + "-byte elements");
    if ((a.role == Role::Output || a.role == Role::Gradient || spec.written_in_place(a, args)) && overlaps_itself(t))
      return bad(a, "an output whose elements overlap: shape " + shape_string(t.dims()) + ", strides " +
                        shape_string({t.stride.data(), static_cast<std::size_t>(t.ndim)}));
    return {};
  }

  // Whether some axis steps by no more than the axes with smaller strides reach.
  static bool overlaps_itself(const TensorView& t) {
    if (t.numel() == 0) return false;
    // In order of strides: the axis taken next is the one with the smallest stride not taken yet.
    std::array<bool, kMaxDims> taken{};
    std::int64_t reach = 0;
    for (int round = 0; round < t.ndim; ++round) {
      std::size_t next = kMaxDims;
      for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i)
        if (!taken[i] && (next == kMaxDims || std::abs(t.stride[i]) < std::abs(t.stride[next]))) next = i;
      taken[next] = true;
      if (t.shape[next] == 1) continue;
      if (std::abs(t.stride[next]) <= reach) return true;
      reach += std::abs(t.stride[next]) * (t.shape[next] - 1);
    }
    return false;
  }

  Status type(const ArgSpec& a, const TensorView& t) {
    const auto want = [&](const std::string& text) {
      return bad(a, "expected dtype " + text + ", got " + name_of(t.dtype));
    };
    switch (a.types) {
      case Types::Index:
        if (is_float(t.dtype)) return want("I32 or I64");
        return {};
      case Types::Float:
        if (!is_float(t.dtype)) return want("F32, F16, BF16 or F64");
        return {};
      case Types::Wide:
        if (!is_float(t.dtype)) return want("F32, F16, BF16 or F64");
        if (wide == nullptr) {
          wide = &a;
          wide_type = t.dtype;
        } else if (t.dtype != wide_type) {
          return want(std::string(name_of(wide_type)) + " (as " + wide->name_of(0) + ")");
        }
        return {};
      case Types::Acc: {
        const DType acc = wide_type == DType::F64 ? DType::F64 : DType::F32;
        if (t.dtype != acc) return want(name_of(acc));
        return {};
      }
      case Types::Like: {
        const ArgSpec* other = spec.find_arg(a.like);
        if (other == nullptr || !view(*other)) return bad(a, "needs " + a.like + ", which was not given");
        if (t.dtype != view(*other).dtype)
          return want(std::string(name_of(view(*other).dtype)) + " (as " + other->name_of(0) + ")");
        return {};
      }
    }
    return {};
  }

  Status shape(const ArgSpec& a, const TensorView& t) {
    const std::vector<std::string>& symbols = spec.dims_of(a, args);
    if (t.ndim != static_cast<int>(symbols.size())) {
      std::string others;
      for (std::size_t n = 0; n < a.other_dims.size() && a.shaped_as.empty() && element == 0; ++n) {
        const std::vector<std::string>& other = a.other_dims[n];
        others += ", or [";
        for (std::size_t i = 0; i < other.size(); ++i) others += (i != 0 ? "," : "") + other[i];
        others += "]";
      }
      return bad(a, expected_shape(a, t) + others);
    }
    for (int i = 0; i < t.ndim; ++i) {
      const auto axis = static_cast<std::size_t>(i);
      const std::string& s = a.swapped_by.empty() ? symbols[axis] : spec.dim_symbol(a, axis, args);
      if (s == "N" && !dims.has("N") && dims.has("B")) dims.set("N", dims["B"]);
      const std::int64_t want = symbol_value(s);
      // A derived size is unknown when the boundaries are on a device, or wrong, which is refused by their name.
      const auto composite = [&] { return s == "N+1" || s.find('*') != std::string::npos; };
      if (want >= 0 ? want != t.dim(i) : composite()) return bad(a, expected_shape(a, t));
      if (want < 0) {
        dims.set(s, t.dim(i));
        const auto most = spec.max_dim.find(s);
        if (most != spec.max_dim.end() && (t.dim(i) < 1 || (most->second > 0 && t.dim(i) > most->second)))
          return bad(a, (s == "T" ? "tokens T" : "width " + s) + " must be " +
                            (most->second > 0 ? "1 to " + std::to_string(most->second) : "at least 1") +
                            " in this function, got " + std::to_string(t.dim(i)));
        if (s != "B" && s != "T" && s != "TQ" && s != "N" && s != "P" && !spec.derived.contains(s) && t.dim(i) < 1)
          return bad(a, "size " + s + " must be at least 1, got " + shape_string(t.dims()));
      }
    }
    return {};
  }

  Status boundaries(const ArgSpec& a, const TensorView& t) const {
    const auto at = [&](std::int64_t i) { return read_index(t, i); };
    if (at(0) != 0) return bad(a, "must start at 0, starts at " + std::to_string(at(0)));
    for (std::int64_t i = 1; i < t.dim(0); ++i)
      if (at(i) < at(i - 1))
        return bad(a, "must not decrease, but entry " + std::to_string(i) + " is " + std::to_string(at(i)) + " after " +
                          std::to_string(at(i - 1)));
    const std::int64_t last = at(t.dim(0) - 1);
    if (last != dims[a.cuts])
      return bad(a.name,
                 "must end at " + a.cuts + " = " + std::to_string(dims[a.cuts]) + ", ends at " + std::to_string(last));
    return {};
  }

  // The same table in the host's memory, for kernels that cannot read the first one's.
  Status host_copy(const ArgSpec& a, const TensorView& t) const {
    const TensorView& of = view(*spec.find_arg(a.host_of));
    if (!of) return bad(a, "given without " + a.host_of);
    if (t.device.type != DeviceType::Cpu) return bad(a, "must be in host memory");
    if (Status s = boundaries(a, t); !s) return s;
    for (std::int64_t i = 0; of.device.type == DeviceType::Cpu && i < of.dim(0); ++i)
      if (read_index(of, i) != read_index(t, i))
        return bad(a, "expected the values of " + a.host_of + ", but entry " + std::to_string(i) + " is " +
                          std::to_string(read_index(t, i)) + ", not " + std::to_string(read_index(of, i)));
    return {};
  }

  // Before the tensors: a shape may depend on a flag.
  Status flags() const {
    for (const auto& f : spec.flags) {
      if (!f.value) continue;
      const FlagValue v = f.value(args);
      if (f.required && std::holds_alternative<std::monostate>(v)) return bad(f.name, "required, but not given");
      if (const auto* d = std::get_if<double>(&v)) {
        if (!std::isfinite(*d)) return bad(f.name, "must be finite, got " + to_string(v));
        if (f.sign == FlagSpec::Sign::Positive && !(*d > 0.0))
          return bad(f.name, "must be above 0, got " + to_string(v));
        if (f.sign == FlagSpec::Sign::Negative && !(*d < 0.0))
          return bad(f.name, "must be below 0, got " + to_string(v));
        if (*d < f.min || *d > f.max) return bad(f.name, "expected " + f.limits() + ", got " + to_string(v));
      } else if (const auto* i = std::get_if<std::int64_t>(&v)) {
        if (static_cast<double>(*i) < f.min || static_cast<double>(*i) > f.max)
          return bad(f.name, "expected " + f.limits() + ", got " + to_string(v));
        if (f.power_of_two && (*i & (*i - 1)) != 0) return bad(f.name, "expected a power of two, got " + to_string(v));
      }
    }
    return {};
  }

  Status tensor(const ArgSpec& a, const TensorView& t) {
    if (!t) {
      if (t.ndim == kTooManyDims)
        return bad(a, "expected rank " + std::to_string(a.dims.size()) + ", got a view of more than " +
                          std::to_string(kMaxDims) + " axes");
      if (a.required) return bad(a, "required, but not given");
      return {};
    }
    if (!spec.has_output(a, args))
      return bad(a, "given, but this call has no such output: expected " + a.only_when_text);
    if (Status s = type(a, t); !s) return s;
    if (Status s = shape(a, t); !s) return s;
    // Before the shapes of other tensors, whose sizes may follow from the boundaries.
    if (packed != nullptr && dims.has("B") && dims["B"] != 1)
      return bad(packed->name, "packed sequences need B = 1, got B = " + std::to_string(dims["B"]));
    if (Status s = memory(a, t); !s) return s;
    if (first == nullptr) {
      first = &a;
      device = t.device;
    } else if (!(t.device == device) && a.host_of.empty()) {
      const auto text = [](Device d) {
        return d.type == DeviceType::Cpu ? std::string("cpu") : "cuda:" + std::to_string(d.index);
      };
      return bad(a, "expected on " + text(device) + " (as " + first->name_of(0) + "), got " + text(t.device));
    }
    return {};
  }

  // A list: their number is a size like any other, and each of its tensors is checked as one of its own would be. Of
  // gradients some may be absent, of inputs none.
  Status tensors(const ArgSpec& a) {
    const TensorList views = a.get.views(args);
    const auto n = static_cast<std::int64_t>(views.size());
    if (views.empty() && !a.required) return {};
    if (views.empty()) return bad(a.name, "required, but not given: expected at least one tensor");
    if (n > kMostElements)
      return bad(a.name, "expected at most " + std::to_string(kMostElements) + " tensors, got " + std::to_string(n));
    if (const std::int64_t want = dims[a.count]; want >= 0 && n != want)
      return bad(a.name, "expected " + std::to_string(want) + " tensors (" + a.count + (a.of.empty() ? "" : ", as ") +
                             a.of + "), got " + std::to_string(n));
    dims.set(a.count, n);
    for (element = 0; element < views.size(); ++element)
      if (Status s = tensor(a, views[element]); !s) return s;
    element = 0;
    return {};
  }

  Status run() {
    for (const auto& refuse : spec.not_offered_checks)
      if (Status s = refuse(args); !s) return s;

    if (Status s = flags(); !s) return s;

    for (const auto& a : spec.args) {
      if (a.cuts.empty() || !a.host_of.empty()) continue;
      const TensorView& t = view(a);
      // Before the tensors, whose sizes would be held against it.
      if (!t && a.required && t.ndim != kTooManyDims) return bad(a, "required, but not given");
      if (!t) continue;
      if (t.ndim != 1 || t.dim(0) < 2) return bad(a, "expected shape [N+1] with N >= 1, got " + shape_string(t.dims()));
      if (Status s = type(a, t); !s) return s;  // sizes are derived from what is in it
      if (packed != nullptr) continue;
      dims.set("N", t.dim(0) - 1);
      packed = &a;
    }
    for (const auto& a : spec.args)
      if (Status s = a.list() ? tensors(a) : tensor(a, view(a)); !s) return s;
    if (dims.full()) return {Code::Internal, spec.name + ": its description has more sizes than a call has room for"};
    if (packed == nullptr) dims.set("N", dims["B"]);
    for (const auto& a : spec.args) {
      const TensorView& t = view(a);
      if (a.cuts.empty() || !t) continue;
      if (a.host_of.empty()) {
        if (t.device.type == DeviceType::Cpu)
          if (Status s = boundaries(a, t); !s) return s;
      } else if (Status s = host_copy(a, t); !s) {
        return s;
      }
    }
    // Whatever a kernel multiplies (states times tokens, scores) stays below this, so sizes and offsets fit 64 bits.
    std::int64_t all = 64;
    constexpr const char* kAxes[][3] = {{"B", "P"}, {"T", "N"}, {"H", "HV", "HQ"}, {"K"}, {"V"}, {"D"}, {"R"},
                                        {"S"},      {"L"}};
    for (const auto& axis : kAxes) {
      std::int64_t n = 1;
      for (const char* symbol : axis)
        if (symbol != nullptr) n = std::max(n, dims[symbol]);
      if (__builtin_mul_overflow(all, n, &all))
        return bad(spec.args.front().name,
                   "the call's sizes together overflow 64 bits: shape " + shape_string(view(spec.args.front()).dims()));
    }
    if (!spec.check) return {};
    const Status s = spec.check(args, dims);
    return s ? s : Status(s.code(), spec.name + ": " + s.message());
  }
};

// First and last byte that a view of at least one element reaches.
std::pair<std::uintptr_t, std::uintptr_t> extent(const TensorView& t) {
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  std::int64_t lo = 0, hi = size - 1;
  for (int i = 0; i < t.ndim; ++i) {
    const std::int64_t reach = (t.dim(i) - 1) * t.stride[static_cast<std::size_t>(i)] * size;
    (reach > 0 ? hi : lo) += reach;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  return {base + static_cast<std::uintptr_t>(lo), base + static_cast<std::uintptr_t>(hi)};
}

// Whether a view's elements fill its extent, in whatever order of axes.
bool dense(const TensorView& t) {
  const auto [lo, hi] = extent(t);
  return static_cast<std::int64_t>(hi - lo) + 1 == t.numel() * static_cast<std::int64_t>(size_of(t.dtype));
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim && a.shape == b.shape && a.stride == b.stride;
}

}  // namespace

namespace {

double value_at(DType t, const std::byte* p) {
  const auto load = [p](auto x) {
    std::memcpy(&x, p, sizeof x);
    return x;
  };
  switch (t) {
    case DType::F32: return static_cast<double>(load(0.0F));
    case DType::F16: return static_cast<double>(to_float(load(f16{})));
    case DType::BF16: return static_cast<double>(to_float(load(bf16{})));
    case DType::F64: return load(0.0);
    default: return 0.0;
  }
}

// What the elements of an input may be besides finite numbers, and what not.
struct ValueRule {
  bool log_gate = false;  // at most 0; -infinity forgets everything
  bool raw_gate = false;  // infinities are the ends of its range

  // What is wrong with a value; "" where nothing is.
  std::string fault(double x) const {
    if (std::isnan(x)) return "is not a number";
    if (std::isinf(x) && !raw_gate && !(log_gate && x < 0.0)) return "is infinite";
    if (log_gate && x > 0.0) return "is " + to_string(FlagValue{x}) + "; a log gate is at most 0";
    return "";
  }
};

// Log gates are known by how they are generated; plain runs leave those out that have none.
ValueRule value_rule(const FunctionSpec& spec, const void* args, const ArgSpec& a) {
  if (a.role != Role::Input) return {};
  if (!a.gen.log_gate() && !(a.gen.kind == Gen::Kind::None && a.name.starts_with('g'))) return {};
  const FlagSpec* f = spec.find_flag("use_gate_in_kernel");
  const bool raw = a.name == "g" && f != nullptr && f->value && f->value(args) == FlagValue{true};
  return {.log_gate = !raw, .raw_gate = raw};
}

// The sequences that a table of slots calls padding: what their inputs hold does not matter.
struct Padding {
  const TensorView* slots = nullptr;
  const TensorView* cu_seqlens = nullptr;

  bool covers(std::int64_t b, std::int64_t t) const {
    if (slots == nullptr) return false;
    std::int64_t n = b;
    if (cu_seqlens != nullptr)
      for (n = 0; n + 1 < slots->dim(0) && t >= read_index(*cu_seqlens, n + 1);) ++n;
    return n < slots->dim(0) && read_index(*slots, n) < 0;
  }
};

// The first element that breaks the rule, and how; "" without one. padding: nullptr where the view's axes are not batch
// and tokens.
std::string first_fault(const TensorView& t, const ValueRule& rule, const Padding* padding) {
  const std::int64_t n = t.numel();
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  std::array<std::int64_t, kMaxDims> at{};
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t offset = 0;
    for (int d = 0; d < t.ndim; ++d) offset += at[static_cast<std::size_t>(d)] * t.stride[static_cast<std::size_t>(d)];
    const double x = value_at(t.dtype, static_cast<const std::byte*>(t.data) + offset * size);
    if ((!std::isfinite(x) || (rule.log_gate && x > 0.0)) && (padding == nullptr || !padding->covers(at[0], at[1])))
      if (const std::string fault = rule.fault(x); !fault.empty())
        return shape_string({at.data(), static_cast<std::size_t>(t.ndim)}) + " " + fault;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (++at[static_cast<std::size_t>(d)] < t.dim(d)) break;
      at[static_cast<std::size_t>(d)] = 0;
    }
  }
  return "";
}

}  // namespace

Status check_values(const FunctionSpec& spec, const void* args, const ReadMemory& read) {
  const std::shared_ptr<void> copy = spec.copy_args(args);
  std::vector<std::unique_ptr<std::byte[]>> memory;
  struct Input {
    const ArgSpec* arg;
    std::size_t element;
    const TensorView* view;
  };
  std::vector<Input> inputs;
  Padding padding;
  for (const ArgSpec& a : spec.args) {
    const bool table = a.types == Types::Index, pool = !a.dims.empty() && a.dims.front() == "P";
    const std::span<TensorView> views = a.get.views(copy.get());
    for (std::size_t element = 0; element < views.size(); ++element) {
      TensorView& t = views[element];
      if (!t) continue;
      const bool wanted = (a.role == Role::Input || a.role == Role::Upstream) && !pool && t.numel() > 0;
      if (wanted && read && t.device.type != DeviceType::Cpu) {
        const auto [lo, hi] = extent(t);
        const std::size_t bytes = hi - lo + 1;
        memory.emplace_back(new (std::nothrow) std::byte[bytes]);
        if (!memory.back())
          return {Code::OutOfMemory, spec.name + ": " + a.name_of(element) + ": no memory to look into " +
                                         std::to_string(bytes) + " bytes"};
        const std::uintptr_t before = reinterpret_cast<std::uintptr_t>(t.data) - lo;
        if (Status s = read(memory.back().get(), static_cast<const std::byte*>(t.data) - before, bytes); !s) return s;
        t.data = memory.back().get() + before;
      }
      t.device = {};
      if (!wanted) continue;
      if (!table) inputs.push_back({&a, element, &t});
      if (a.name.ends_with("state_indices")) padding.slots = &t;
      if (a.name == "cu_seqlens") padding.cu_seqlens = &t;
    }
  }
  Dims dims;
  Device device;
  if (read)
    if (Status s = check_call(spec, copy.get(), dims, device); !s) return s;
  for (const auto& [a, element, view] : inputs) {
    const bool tokens = a->dims.size() > 1 && a->dims[0] == "B" && a->dims[1] == "T";
    const ValueRule rule = value_rule(spec, copy.get(), *a);
    if (const std::string fault = first_fault(*view, rule, tokens ? &padding : nullptr); !fault.empty())
      return {Code::InvalidArgument, spec.name + ": " + a->name_of(element) + ": the value at " + fault};
  }
  return {};
}

namespace {

// Where a tensor lies, and whether the call writes there.
struct Place {
  const ArgSpec* arg;
  std::size_t element;
  const TensorView* view;
  std::uintptr_t lo, hi;
  bool written;
};

// Calls allocate nothing: places are held in blocks of as many as most calls have at most.
struct Places {
  static constexpr std::size_t kMost = 64;
  std::array<Place, kMost> list;  // the first `count` are there
  std::size_t count = 0;

  // The tensors of a call from the `skip`th on, as many as there is room for.
  void fill(const FunctionSpec& spec, const void* args, std::size_t skip) {
    count = 0;
    std::size_t seen = 0;
    for (const ArgSpec& a : spec.args) {
      const bool out = a.role == Role::Output || a.role == Role::Gradient;
      const TensorList views = a.get.views(args);
      for (std::size_t element = 0; element < views.size(); ++element) {
        const TensorView& t = views[element];
        if (!t || t.numel() == 0 || seen++ < skip) continue;
        if (count == kMost) return;
        const auto [lo, hi] = extent(t);
        list[count++] = {&a, element, &t, lo, hi, out || spec.written_in_place(a, args)};
      }
    }
  }
};

Status check_apart(const FunctionSpec& spec, const Places& written, const Places& all) {
  for (std::size_t i = 0; i < written.count; ++i) {
    const Place& x = written.list[i];
    if (!x.written) continue;
    for (std::size_t j = 0; j < all.count; ++j) {
      const Place& y = all.list[j];
      if (x.view == y.view || y.hi < x.lo || x.hi < y.lo) continue;
      const TensorView &o = *x.view, &t = *y.view;
      const ArgSpec &out = *x.arg, &other = *y.arg;
      if (!(t.device == o.device)) continue;
      // Slices of one fused tensor interleave without meeting; only a dense view surely meets what lies in its extent.
      if (!dense(o) && !dense(t)) continue;
      if (out.name.starts_with("final_state") && other.name == "initial_state" + out.name.substr(11) && same_view(o, t))
        continue;
      if (!out.starts_as.empty() && other.name == out.starts_as && same_view(o, t)) continue;
      if (other.starts_as == out.name && same_view(o, t)) continue;
      return {Code::InvalidArgument,
              spec.name + ": " + out.name_of(x.element) + ": overlaps " + other.name_of(y.element) +
                  " in memory; of all outputs only a final state may be exactly its initial state"};
    }
  }
  return {};
}

}  // namespace

Status check_overlaps(const FunctionSpec& spec, const void* args) {
  Places places;
  for (std::size_t from = 0;; from += Places::kMost) {
    places.fill(spec, args, from);
    if (Status s = check_apart(spec, places, places); !s) return s;
    if (places.count < Places::kMost) return {};
    Places later;
    std::size_t next = from;
    do {
      later.fill(spec, args, next += Places::kMost);
      if (Status s = check_apart(spec, places, later); !s) return s;
      if (Status s = check_apart(spec, later, places); !s) return s;
    } while (later.count == Places::kMost);
  }
}

namespace {
std::atomic<CallObserver> call_observer{nullptr};
}

void observe_calls(CallObserver observer) { call_observer.store(observer, std::memory_order_relaxed); }

Status check_call(const FunctionSpec& spec, const void* args, Dims& dims, Device& device) {
  if (const CallObserver tell = call_observer.load(std::memory_order_relaxed); tell != nullptr) tell(spec);
  return Checker{.spec = spec, .args = args, .dims = dims, .device = device}.run();
}

}  // namespace fla
