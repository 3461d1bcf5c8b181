// OpSpec: the one description of a public function. The argument checks, the program, the gate, the benchmark, the
// recorded-case runner and the operator table in the docs all read it; nothing about an operator is written twice.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "fla/core/export.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/registry/call.h"

namespace fla {

// How tools make an input. The benchmark uses the plain form; the gate adds the regimes of a log gate.
struct Gen {
  // Against: rows of the input `of`, each times a number in (-1, 0). Moment: X X^T / width over the last two axes,
  // symmetric and positive semidefinite as a second moment is.
  enum class Kind : std::uint8_t {
    Normal,
    AbsNormal,
    LogSigmoid,
    Sigmoid,
    UnitRows,
    NegUniform,
    Against,
    None,
    Moment,
  };
  Kind kind = Kind::Normal;
  double min = -1e30;  // LogSigmoid: lower clamp. NegUniform: values in [min, 0]
  double scale = 1.0;  // factor on Normal
  std::string of{};    // Against
  // An optional input is made without being asked for: a gate, a strength, but no state.
  bool by_default() const { return kind != Kind::None && kind != Kind::Moment; }
  bool log_gate() const { return kind == Kind::LogSigmoid || kind == Kind::NegUniform; }
};

// Which element types an argument may have.
enum class Types : std::uint8_t {
  Wide,   // F32, F16, BF16, F64: the type of q (or x), shared by all wide arguments of a call
  Float,  // any float type, independent of the others
  Acc,    // F32; F64 in an F64 call: states that leave, per-head constants
  Like,   // exactly the type of the argument named in `like`
  Index,  // I32 or I64
};

enum class Role : std::uint8_t {
  Input,
  Output,
  Upstream,  // gradient of an output, input of a backward
  Gradient,  // gradient of an input, output of a backward
};

using FlagValue = std::variant<std::monostate, bool, std::int64_t, double>;
FLA_API std::string to_string(const FlagValue& v);

// The place of a view, or of a list of views, in an args struct, found once from its member pointer: checks ask for it
// at every call.
class Member {
 public:
  Member() = default;
  // `args`: any object of the struct, and the second its member.
  Member(const void* args, const TensorView& view) : offset_(between(args, &view)) {}
  Member(const void* args, const TensorList& list) : offset_(between(args, &list)), list_(true) {}
  explicit operator bool() const { return offset_ >= 0; }
  // One view, absent or not; of a list its views, none where it was not given.
  TensorList views(const void* args) const {
    const std::byte* at = static_cast<const std::byte*>(args) + offset_;
    if (list_) return *reinterpret_cast<const TensorList*>(at);
    return {reinterpret_cast<const TensorView*>(at), 1};
  }
  // To write to: of structs from FunctionSpec::copy_args, which have lists of their own, and of calls by name.
  std::span<TensorView> views(void* args) const {
    const TensorList v = views(static_cast<const void*>(args));
    return {const_cast<TensorView*>(v.data()), v.size()};
  }
  // The view; of a list its first, which tells shape and type of them all, absent without one.
  const TensorView& operator()(const void* args) const {
    const TensorList v = views(args);
    return v.empty() ? kAbsent : v.front();
  }
  void set_list(void* args, TensorList views) const {
    *reinterpret_cast<TensorList*>(static_cast<std::byte*>(args) + offset_) = views;
  }

 private:
  static std::ptrdiff_t between(const void* args, const void* member) {
    return static_cast<const std::byte*>(member) - static_cast<const std::byte*>(args);
  }
  inline static const TensorView kAbsent{};
  std::ptrdiff_t offset_ = -1;
  bool list_ = false;
};

// The name of one tensor of a list: "residuals.2", as files and callers by name write it, or "residuals[2]", as
// refusals do. Element -1: of no list.
struct ElementName {
  std::string_view list;
  std::int64_t element = -1;
};
ElementName element_name(std::string_view name);
// More than that are refused before memory is taken for their names.
inline constexpr std::int64_t kMostElements = 1 << 16;

struct ArgSpec {
  std::string name;  // "q"; of a gradient "dq"
  std::string of;    // the tensor a gradient belongs to: "q", "o"
  std::string doc;
  Role role = Role::Input;
  Types types = Types::Wide;
  std::string like;                                  // Types::Like
  std::vector<std::string> dims;                     // "B", "T", "H", "K", "N", "N+1", "2", "T*R"
  std::vector<std::vector<std::string>> other_dims;  // further shapes it may have, each of a rank of its own
  std::string shaped_as;                             // of those it has the one in the place of that argument's
  std::string count;                                 // of a list of tensors: the size that their number is ("L")
  bool required = false;
  bool grad = false;         // an input whose gradient the backward gives
  std::string together;      // a flag that has to come with it
  std::string requested_by;  // an output that a caller by name gets only with this flag; empty: always
  std::string swapped_by;    // a bool flag that swaps the last two axes (state_v_first); empty: none
  // An output that a call writes in part (a pool of states) starts as the input named here: its memory is that input's
  // own, which an absent output means, or holds a copy of it.
  std::string starts_as;
  std::string cuts;     // boundaries of packed sequences: the axis that they cut ("T"); empty: no boundaries
  std::string host_of;  // the same table in the host's memory as the input named here
  std::function<bool(const void*)> only_when;  // calls that have this output; empty: all
  std::string only_when_text;
  Gen gen;
  Member get;  // where the args struct has it

  bool list() const { return !count.empty(); }
  // What files and callers by name call it: "q", "out.o", "grad_out.o", "grad.q"; a list's tensor "grad.residuals.2".
  FLA_API std::string name_in_files() const;
  FLA_API std::string name_in_files(std::size_t element) const;
  // What refusals call it: "q", "residuals[2]".
  std::string name_of(std::size_t element) const;
};

struct FlagSpec {
  enum class Type : std::uint8_t { Bool, Int, Float };
  std::string name{};
  std::string doc{};
  Type type = Type::Bool;
  FlagValue def{};        // monostate: none (see doc for what stands in)
  bool required = false;  // no default exists
  double min = -1e308, max = 1e308;
  enum class Sign : std::uint8_t { Any, Positive, Negative };
  Sign sign = Sign::Any;
  bool power_of_two = false;
  bool takes_none = false;                             // none is a value of its own, not the default
  std::string retired_for{};                           // an old name of the flag named here
  std::string together{};                              // an input or flag that has to come with it
  std::string excludes{};                              // a flag that cannot come with it
  std::function<void(void*, const FlagValue&)> set{};  // empty: the flag only asks for an output
  std::function<FlagValue(const void*)> value{};

  // "32 to 64", "64", "at least 1", "at most 8"; empty: any number.
  FLA_API std::string limits() const;
};

// Sizes of a call, by symbol ("B" -> 2). No allocation. Symbols are short, so they are compared as numbers.
class Dims {
 public:
  std::int64_t operator[](std::string_view symbol) const {  // -1 when unknown
    const std::uint64_t key = key_of(symbol);
    for (std::size_t i = 0; i < size_; ++i)
      if (keys_[i] == key) return values_[i];
    return -1;
  }
  bool has(std::string_view symbol) const { return (*this)[symbol] >= 0; }
  void set(std::string_view symbol, std::int64_t value) {
    const std::uint64_t key = key_of(symbol);
    for (std::size_t i = 0; i < size_; ++i)
      if (keys_[i] == key) {
        values_[i] = value;
        return;
      }
    if (size_ < kMost && symbol.size() <= sizeof key) {
      keys_[size_] = key;
      values_[size_++] = value;
    } else {
      full_ = true;
    }
  }
  // A symbol more, or longer, than there is room for: a description that nothing can check.
  bool full() const { return full_; }

 private:
  static std::uint64_t key_of(std::string_view symbol) {
    std::uint64_t key = 0;
    for (std::size_t i = 0; i < symbol.size() && i < sizeof key; ++i)
      key |= std::uint64_t{static_cast<unsigned char>(symbol[i])} << (8 * i);
    return key;
  }
  static constexpr std::size_t kMost = 24;
  std::array<std::uint64_t, kMost> keys_;   // the first size_ are there
  std::array<std::int64_t, kMost> values_;  // likewise
  std::size_t size_ = 0;
  bool full_ = false;
};

// The value of an axis symbol: a number, a size, "N+1", or a product of those ("T*R"). `leaf` knows the sizes and gives
// -1 for one it does not know, as this does.
template <typename Leaf>
std::int64_t dim_value(std::string_view symbol, const Leaf& leaf) {
  if (symbol.size() == 1 && (symbol[0] < '0' || symbol[0] > '9')) return leaf(symbol);
  std::int64_t product = 1;
  while (!symbol.empty()) {
    const std::size_t end = std::min(symbol.find('*'), symbol.size());
    const std::string_view s = symbol.substr(0, end);
    symbol.remove_prefix(std::min(end + 1, symbol.size()));
    std::int64_t value = 0;
    if (s == "N+1") {
      value = leaf("N");
      value = value < 0 ? -1 : value + 1;
    } else if (!s.empty() && s[0] >= '0' && s[0] <= '9') {
      for (const char c : s) value = 10 * value + (c - '0');
    } else {
      value = leaf(s);
    }
    if (value < 0 || __builtin_mul_overflow(product, value, &product)) return -1;
  }
  return product;
}

struct FLA_API FunctionSpec {
  std::string name;       // "chunk_gla"
  std::string operation;  // family: "gla"
  bool root = true;       // exported at FLA's root; else by the family alone
  bool deprecated = false;
  std::string alias_of;  // serves the call under its own name
  std::string doc;
  std::string source;                    // paper
  std::vector<ArgSpec> args;             // in signature order
  std::vector<FlagSpec> flags;           // in signature order
  std::vector<std::string> not_offered;  // members of the args struct that belong to sibling functions
  std::vector<std::function<Status(const void*)>> not_offered_checks;
  std::vector<std::pair<std::string, FlagValue>> bench_flags;  // values tools pass for flags without a default
  std::map<std::string, std::int64_t> max_dim;                 // K, V: 256 unless the family's page allows more
  // Sizes that no input's shape tells: R from a flag, NT from the boundaries. -1: not known.
  std::map<std::string, std::function<std::int64_t(const void*, const Dims&)>, std::less<>> derived;
  std::map<std::string, double> tolerance;        // R on 16-bit runs by tensor name ("o", "dq"); "" is the default
  std::string backward;                           // name of the backward function; empty: none
  std::string forward;                            // of a backward: what it belongs to
  bool pair_state = false;                        // initial_state and final_state may be pairs (.0, .1)
  std::function<bool(const void*)> pair_outputs;  // whether this call names its final states .0 and .1
  std::function<Status(const void*, const Dims&)> check;  // what the tables cannot say
  std::function<double(const Dims&)> flops;               // useful operations, for the roofline; empty: no model
  std::function<std::shared_ptr<void>()> make_args;
  std::function<std::shared_ptr<void>(const void*)> copy_args;

  bool is_backward() const { return !forward.empty(); }
  // Also by the name of a list's tensor.
  const ArgSpec* find_arg(std::string_view name) const;
  const FlagSpec* find_flag(std::string_view name) const;
  double tolerance_of(std::string_view tensor) const;
  bool has_output(const ArgSpec& a, const void* call) const { return !a.only_when || a.only_when(call); }
  // Whether this call writes into the input itself: an output that starts as it was not given.
  bool written_in_place(const ArgSpec& input, const void* call) const;
  // The symbols of an argument's axes in this call: of the shape that it, or the input it is the gradient of, came in.
  const std::vector<std::string>& dims_of(const ArgSpec& a, const void* args) const;
  const std::string& dim_symbol(const ArgSpec& a, std::size_t axis, const void* args) const;
};

// The contract's checks for one call, from the tables alone, then spec.check. Fills `dims`. Touches no tensor's data
// but cu_seqlens on the host.
FLA_API Status check_call(const FunctionSpec& spec, const void* args, Dims& dims, Device& device);

// Copies from the memory where a call's tensors are, after all that was queued for it before.
using ReadMemory = std::function<Status(void* to, const void* from, std::size_t bytes)>;

// What check_call leaves out as it costs time: refuses inputs that hold a NaN (slots of a pool may), and repeats
// check_call with the tables that are on a device.
Status check_values(const FunctionSpec& spec, const void* args, const ReadMemory& read);

// Refuses outputs that share memory with another argument: what a kernel reads would depend on what it already wrote.
// A final state may be exactly its initial state, and what starts as an input that input. Views that both have gaps are
// taken for slices of one fused tensor.
Status check_overlaps(const FunctionSpec& spec, const void* args);

// ---- the builder -------------------------------------------------------------------------------------------------

struct ArgOptions {
  Types types = Types::Wide;
  std::vector<std::string> other_dims{};  // further shapes: "B T HV V"
  std::string shaped_as{};                // the argument whose shape says which of them
  std::string count{};                    // of a list: the size that the number of its tensors is
  std::string like{};
  Gen gen{};
  std::string requested_by{};
  std::string swapped_by{};
  std::string starts_as{};
  std::string cuts{};     // of boundaries [N+1]: the axis that they cut; empty: "T"
  std::string host_of{};  // of a host copy: what it copies
  std::string doc{};
};

// Describes a forward function and its backward together. F: forward args; G: backward args, derived from F. Without a
// backward G is F and no input has a gradient.
template <typename F, typename G = F>
class OpSpec {
 public:
  OpSpec(FunctionId<F> forward, std::string operation) {
    fwd_.name = forward.name;
    fwd_.operation = std::move(operation);
    set_args<F>(fwd_);
    fwd_.max_dim = {{"K", 256}, {"V", 256}};
  }
  OpSpec(FunctionId<F> forward, FunctionId<G> backward, std::string operation) {
    fwd_.name = forward.name;
    bwd_.name = backward.name;
    fwd_.operation = bwd_.operation = std::move(operation);
    fwd_.backward = bwd_.name;
    bwd_.forward = fwd_.name;
    set_args<F>(fwd_);
    set_args<G>(bwd_);
    fwd_.max_dim = bwd_.max_dim = {{"K", 256}, {"V", 256}};
  }

  using View = TensorView F::*;
  using GradView = TensorView G::*;
  using List = TensorList F::*;
  using GradList = TensorList G::*;

  // A required input; grad is where the backward puts its gradient (nullptr: not differentiable).
  OpSpec& in(std::string name, View m, std::string_view dims, GradView grad, ArgOptions o = {}) {
    return input(std::move(name), m, dims, grad, std::move(o), true);
  }
  OpSpec& opt_in(std::string name, View m, std::string_view dims, GradView grad, ArgOptions o = {}) {
    return input(std::move(name), m, dims, grad, std::move(o), false);
  }
  // A required list of at least one tensor; o.count names the size that their number is.
  OpSpec& in(std::string name, List m, std::string_view dims, GradList grad, ArgOptions o) {
    return input(std::move(name), m, dims, grad, std::move(o), true);
  }
  // An output; upstream is where the backward finds its gradient (nullptr: a constant of the backward).
  OpSpec& out(const std::string& name, View m, std::string_view dims, GradView upstream, ArgOptions o = {}) {
    fwd_.args.push_back(make(name, m, dims, Role::Output, o));
    if (upstream != nullptr) {
      o.requested_by.clear();
      ArgSpec a = make("d" + name, upstream, dims, Role::Upstream, o);
      a.of = name;
      a.types = Types::Float;  // an upstream gradient comes in whatever type its producer used
      pending_.push_back(std::move(a));
    }
    return *this;
  }

  OpSpec& flag(std::string name, bool F::*m, bool def, std::string doc) {
    return push({.name = std::move(name),
                 .doc = std::move(doc),
                 .type = FlagSpec::Type::Bool,
                 .def = def,
                 .set = [m](void* a, const FlagValue& v) { static_cast<F*>(a)->*m = std::get<bool>(v); },
                 .value = [m](const void* a) -> FlagValue { return static_cast<const F*>(a)->*m; }});
  }
  OpSpec& flag(std::string name, std::optional<bool> F::*m, bool def, std::string doc) {
    return push(
        {.name = std::move(name),
         .doc = std::move(doc),
         .type = FlagSpec::Type::Bool,
         .def = def,
         .set = [m](void* a, const FlagValue& v) { static_cast<F*>(a)->*m = std::get<bool>(v); },
         .value = [m, def](const void* a) -> FlagValue { return (static_cast<const F*>(a)->*m).value_or(def); }});
  }
  OpSpec& flag(std::string name, std::int64_t F::*m, FlagSpec limits, std::string doc) {
    limits.name = std::move(name);
    limits.doc = std::move(doc);
    limits.type = FlagSpec::Type::Int;
    limits.set = [m](void* a, const FlagValue& v) { static_cast<F*>(a)->*m = std::get<std::int64_t>(v); };
    limits.value = [m](const void* a) -> FlagValue { return static_cast<const F*>(a)->*m; };
    return push(std::move(limits));
  }
  OpSpec& flag(std::string name, std::optional<std::int64_t> F::*m, FlagSpec limits, std::string doc) {
    limits.name = std::move(name);
    limits.doc = std::move(doc);
    limits.type = FlagSpec::Type::Int;
    limits.set = [m](void* a, const FlagValue& v) { static_cast<F*>(a)->*m = std::get<std::int64_t>(v); };
    limits.value = [m](const void* a) -> FlagValue {
      const auto& x = static_cast<const F*>(a)->*m;
      return x ? FlagValue{*x} : FlagValue{};
    };
    return push(std::move(limits));
  }
  OpSpec& flag(std::string name, std::optional<double> F::*m, std::string doc) {
    return push({.name = std::move(name),
                 .doc = std::move(doc),
                 .type = FlagSpec::Type::Float,
                 .def = {},
                 .set = [m](void* a, const FlagValue& v) { static_cast<F*>(a)->*m = std::get<double>(v); },
                 .value = [m](const void* a) -> FlagValue {
                   const auto& x = static_cast<const F*>(a)->*m;
                   return x ? FlagValue{*x} : FlagValue{};
                 }});
  }
  OpSpec& flag(std::string name, double F::*m, FlagSpec limits, std::string doc) {
    limits.name = std::move(name);
    limits.doc = std::move(doc);
    limits.type = FlagSpec::Type::Float;
    limits.set = [m](void* a, const FlagValue& v) { static_cast<F*>(a)->*m = std::get<double>(v); };
    limits.value = [m](const void* a) -> FlagValue { return static_cast<const F*>(a)->*m; };
    return push(std::move(limits));
  }
  // A member whose own default is a number (limits.def), while none has a meaning of its own.
  OpSpec& flag(std::string name, std::optional<double> F::*m, FlagSpec limits, std::string doc) {
    limits.name = std::move(name);
    limits.doc = std::move(doc);
    limits.type = FlagSpec::Type::Float;
    limits.takes_none = true;
    limits.set = [m](void* a, const FlagValue& v) {
      const auto* d = std::get_if<double>(&v);
      static_cast<F*>(a)->*m = d != nullptr ? std::optional<double>(*d) : std::nullopt;
    };
    limits.value = [m](const void* a) -> FlagValue {
      const auto& x = static_cast<const F*>(a)->*m;
      return x ? FlagValue{*x} : FlagValue{};
    };
    return push(std::move(limits));
  }
  // A flag that, to callers by name, asks for an output; typed callers ask by passing the output's view.
  OpSpec& output_flag(std::string name, std::string doc, bool def = false) {
    return push({.name = std::move(name),
                 .doc = std::move(doc),
                 .type = FlagSpec::Type::Bool,
                 .def = def,
                 .set = {},
                 .value = {}});
  }
  // An old name: accepted by name-based callers with a warning, refused beside the new one.
  OpSpec& retired_flag(std::string name, std::string now) {
    const FlagSpec* f = fwd_.find_flag(now);
    FlagSpec old = *f;
    old.name = std::move(name);
    old.doc = "old name of " + now;
    old.retired_for = std::move(now);
    return push(std::move(old));
  }
  // A member of the shared args struct that this function does not have: anything but its default is refused.
  OpSpec& without(const std::string& name, bool F::*m, bool def = false) {
    return lacks(name, [m, def](const F& a) { return a.*m != def; });
  }
  OpSpec& without(const std::string& name, std::optional<bool> F::*m) {
    return lacks(name, [m](const F& a) { return (a.*m).has_value(); });
  }
  OpSpec& without(const std::string& name, std::optional<double> F::*m) {
    return lacks(name, [m](const F& a) { return (a.*m).has_value(); });
  }
  OpSpec& without(const std::string& name, std::optional<std::int64_t> F::*m) {
    return lacks(name, [m](const F& a) { return (a.*m).has_value(); });
  }
  OpSpec& without(const std::string& name, View m) {
    return lacks(name, [m](const F& a) { return (a.*m).present(); });
  }
  OpSpec& without(const std::string& name, std::int64_t F::*m, std::int64_t def) {
    return lacks(name, [m, def](const F& a) { return a.*m != def; });
  }

  // An output, already described, that only some calls have; `text` says which ("inplace_final_state false").
  OpSpec& only_when(std::string_view output, std::function<bool(const F&)> fn, const std::string& text) {
    for (ArgSpec& a : fwd_.args)
      if (a.name == output) {
        a.only_when = [fn](const void* call) { return fn(*static_cast<const F*>(call)); };
        a.only_when_text = text;
      }
    return *this;
  }
  OpSpec& max_dim(const std::string& symbol, std::int64_t most) {
    fwd_.max_dim[symbol] = bwd_.max_dim[symbol] = most;
    return *this;
  }
  // Legal values of a number are all above 0, or all below.
  OpSpec& positive(std::string_view flag) { return with_sign(flag, FlagSpec::Sign::Positive); }
  OpSpec& negative(std::string_view flag) { return with_sign(flag, FlagSpec::Sign::Negative); }
  // Neither makes sense without the other; what exactly is refused is said by .check.
  OpSpec& together(std::string_view name, const std::string& with) {
    for (FunctionSpec* s : {&fwd_, &bwd_}) {
      for (auto& a : s->args)
        if (a.name == name) a.together = with;
      for (auto& f : s->flags)
        if (f.name == name) f.together = with;
    }
    return *this;
  }
  OpSpec& excludes(std::string_view flag, const std::string& other) {
    for (FunctionSpec* s : {&fwd_, &bwd_})
      for (auto& f : s->flags)
        if (f.name == flag) f.excludes = other;
    return *this;
  }
  // A size that no input's shape tells.
  OpSpec& derive(const std::string& symbol, std::function<std::int64_t(const F&, const Dims&)> fn) {
    fwd_.derived[symbol] = [fn](const void* a, const Dims& d) { return fn(*static_cast<const F*>(a), d); };
    bwd_.derived[symbol] = [fn](const void* a, const Dims& d) {
      return fn(static_cast<const F&>(*static_cast<const G*>(a)), d);
    };
    return *this;
  }
  OpSpec& check(std::function<Status(const F&, const Dims&)> fn) {
    fwd_.check = [fn](const void* a, const Dims& d) { return fn(*static_cast<const F*>(a), d); };
    bwd_.check = [fn](const void* a, const Dims& d) { return fn(static_cast<const F&>(*static_cast<const G*>(a)), d); };
    return *this;
  }
  OpSpec& pair_state(std::function<bool(const F&)> outputs_are_pairs) {
    fwd_.pair_state = bwd_.pair_state = true;
    fwd_.pair_outputs = [fn = std::move(outputs_are_pairs)](const void* a) { return fn(*static_cast<const F*>(a)); };
    return *this;
  }
  OpSpec& tolerance(double general, std::map<std::string, double> by_tensor = {}) {
    by_tensor[""] = general;
    fwd_.tolerance = bwd_.tolerance = std::move(by_tensor);
    return *this;
  }
  OpSpec& flops(std::function<double(const Dims&)> forward, std::function<double(const Dims&)> backward) {
    fwd_.flops = std::move(forward);
    bwd_.flops = std::move(backward);
    return *this;
  }
  // What the benchmark and the gate pass for a flag that has no default.
  OpSpec& bench_flag(const std::string& name, FlagValue v) {
    fwd_.bench_flags.emplace_back(name, v);
    bwd_.bench_flags.emplace_back(name, v);
    return *this;
  }
  OpSpec& family_export() {
    fwd_.root = bwd_.root = false;
    return *this;
  }
  OpSpec& deprecated(const std::string& name) {
    fwd_.deprecated = bwd_.deprecated = true;
    return alias_of(name);
  }
  // Another name of the function `name`.
  OpSpec& alias_of(const std::string& name) {
    fwd_.alias_of = name;
    return *this;
  }
  OpSpec& doc(const std::string& text, const std::string& source) {
    fwd_.doc = text;
    bwd_.doc = "Gradients of " + fwd_.name + ".";
    fwd_.source = bwd_.source = source;
    return *this;
  }

  bool has_backward() const { return !fwd_.backward.empty(); }
  FunctionSpec take_forward() {
    order(fwd_.args);
    forget_absent_widths(fwd_);
    own_lists(fwd_);
    return std::move(fwd_);
  }
  FunctionSpec take_backward() {
    for (auto& a : pending_) bwd_.args.push_back(std::move(a));
    for (auto& a : gradients_) bwd_.args.push_back(std::move(a));
    pending_.clear();
    gradients_.clear();
    order(bwd_.args);
    forget_absent_widths(bwd_);
    own_lists(bwd_);
    return std::move(bwd_);
  }

 private:
  template <typename A>
  static void set_args(FunctionSpec& s) {
    s.make_args = [] { return std::static_pointer_cast<void>(std::make_shared<A>()); };
    s.copy_args = [](const void* a) {
      return std::static_pointer_cast<void>(std::make_shared<A>(*static_cast<const A*>(a)));
    };
  }
  static void forget_absent_widths(FunctionSpec& spec) {
    std::erase_if(spec.max_dim, [&](const auto& limit) {
      return std::none_of(spec.args.begin(), spec.args.end(), [&](const ArgSpec& a) {
        return std::find(a.dims.begin(), a.dims.end(), limit.first) != a.dims.end();
      });
    });
  }
  // A copy of the args points to lists of its own, which live as long.
  static void own_lists(FunctionSpec& spec) {
    std::vector<Member> lists;
    for (const ArgSpec& a : spec.args)
      if (a.list()) lists.push_back(a.get);
    if (lists.empty()) return;
    struct Owned {
      std::shared_ptr<void> args;
      std::vector<std::vector<TensorView>> lists;
    };
    spec.copy_args = [lists, copy = std::move(spec.copy_args)](const void* args) {
      auto owned = std::make_shared<Owned>();
      owned->args = copy(args);
      for (const Member& m : lists) {
        const TensorList views = m.views(args);
        m.set_list(owned->args.get(), owned->lists.emplace_back(views.begin(), views.end()));
      }
      return std::shared_ptr<void>(owned, owned->args.get());
    };
  }
  // Inputs as described, then boundaries, upstream gradients, and what comes out.
  static void order(std::vector<ArgSpec>& args) {
    const auto rank = [](const ArgSpec& a) {
      return a.role != Role::Input ? 1 + static_cast<int>(a.role) : a.types == Types::Index ? 1 : 0;
    };
    std::stable_sort(args.begin(), args.end(), [&](const ArgSpec& a, const ArgSpec& b) { return rank(a) < rank(b); });
  }
  OpSpec& with_sign(std::string_view flag, FlagSpec::Sign sign) {
    for (FunctionSpec* s : {&fwd_, &bwd_})
      for (auto& f : s->flags)
        if (f.name == flag) f.sign = sign;
    return *this;
  }
  static std::vector<std::string> split(std::string_view dims) {
    std::vector<std::string> symbols;
    for (std::size_t i = 0; i < dims.size();) {
      const std::size_t end = std::min(dims.find(' ', i), dims.size());
      symbols.emplace_back(dims.substr(i, end - i));
      i = end + 1;
    }
    return symbols;
  }
  template <typename Base, typename Views>
  static ArgSpec make(const std::string& name, Views Base::*m, std::string_view dims, Role role, const ArgOptions& o) {
    ArgSpec a;
    a.name = name;
    a.role = role;
    a.types = o.types;
    a.like = o.like;
    a.gen = o.gen;
    a.requested_by = o.requested_by;
    a.swapped_by = o.swapped_by;
    a.starts_as = o.starts_as;
    a.host_of = o.host_of;
    a.shaped_as = o.shaped_as;
    a.count = o.count;
    a.doc = o.doc;
    a.dims = split(dims);
    if (o.types == Types::Index && a.dims.size() == 1 && a.dims[0] == "N+1") a.cuts = o.cuts.empty() ? "T" : o.cuts;
    for (const auto& other : o.other_dims) a.other_dims.push_back(split(other));
    const Base args{};
    a.get = Member(&args, args.*m);
    return a;
  }
  template <typename Views>
  OpSpec& input(std::string name, Views F::*m, std::string_view dims, Views G::*grad, ArgOptions o, bool required) {
    ArgSpec a = make(name, m, dims, Role::Input, o);
    a.required = required;
    a.grad = grad != nullptr;
    fwd_.args.push_back(a);
    const G args{};
    a.get = Member(&args, static_cast<const F&>(args).*m);
    bwd_.args.push_back(std::move(a));
    if (grad != nullptr) {
      ArgSpec d = make("d" + name, grad, dims, Role::Gradient,
                       {.types = Types::Like,
                        .other_dims = o.other_dims,
                        .count = o.count,
                        .like = name,
                        .swapped_by = o.swapped_by});
      d.of = std::move(name);
      gradients_.push_back(std::move(d));
    }
    return *this;
  }
  OpSpec& push(FlagSpec f) {
    if (f.set) {
      FlagSpec b = f;
      b.set = [set = f.set](void* p, const FlagValue& v) { set(&static_cast<F&>(*static_cast<G*>(p)), v); };
      b.value = [value = f.value](const void* p) { return value(&static_cast<const F&>(*static_cast<const G*>(p))); };
      bwd_.flags.push_back(std::move(b));
    }
    fwd_.flags.push_back(std::move(f));
    return *this;
  }
  template <typename Pred>
  OpSpec& lacks(const std::string& name, Pred given) {
    auto refuse = [name](const std::string& fn) {
      return Status(Code::InvalidArgument, fn + ": " + name + ": not an argument of this function");
    };
    fwd_.not_offered.push_back(name);
    fwd_.not_offered_checks.push_back([given, refuse, fn = fwd_.name](const void* a) {
      return given(*static_cast<const F*>(a)) ? refuse(fn) : Status();
    });
    bwd_.not_offered_checks.push_back([given, refuse, fn = bwd_.name](const void* a) {
      return given(static_cast<const F&>(*static_cast<const G*>(a))) ? refuse(fn) : Status();
    });
    return *this;
  }

  FunctionSpec fwd_, bwd_;
  std::vector<ArgSpec> pending_, gradients_;
};

}  // namespace fla
