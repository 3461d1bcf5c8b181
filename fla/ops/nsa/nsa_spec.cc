#include "fla/core/index_table.h"
#include "fla/ops/nsa/nsa.h"
#include "fla/ops/spec/attn_spec.h"

namespace fla {

namespace {

constexpr const char* kSource =
    "Yuan et al., Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention, 2025";

std::string number(std::int64_t n) { return std::to_string(n); }

// Beside what the tables say of both lists.
Status check_pair(const NsaArgs& a) {
  if (!a.cu_seqlens_q && !a.cu_seqlens_k) return {};
  if (!a.cu_seqlens_q) return refused("cu_seqlens_q", "needed by cu_seqlens_k, which was given");
  if (!a.cu_seqlens_k) return refused("cu_seqlens_k", "needed by cu_seqlens_q, which was given");
  if (a.cu_seqlens) return refused("cu_seqlens_q", "given beside cu_seqlens");
  if (a.cu_seqlens_q.device.type != DeviceType::Cpu || a.cu_seqlens_k.device.type != DeviceType::Cpu) return {};
  const auto length = [](const TensorView& t, std::int64_t n) { return read_index(t, n + 1) - read_index(t, n); };
  for (std::int64_t n = 0; n + 1 < a.cu_seqlens_q.dim(0); ++n)
    if (length(a.cu_seqlens_q, n) > length(a.cu_seqlens_k, n))
      return refused("cu_seqlens_q", "sequence " + number(n) + " has " + number(length(a.cu_seqlens_q, n)) +
                                         " queries, but " + number(length(a.cu_seqlens_k, n)) + " keys");
  return {};
}

Status check_block_size(std::int64_t size, std::int64_t count) {
  if (size >= 2 * count) return {};
  return refused("block_size", "expected at least twice block_counts = " + number(count) +
                                   " where blocks are chosen, got " + number(size));
}

Status check(const NsaArgs& a, const Dims& d, bool backward) {
  if (Status s = check_query_groups(d); !s) return s;
  if (Status s = check_pair(a); !s) return s;
  const std::int64_t TQ = a.q.dim(1), T = a.k.dim(1);
  if (TQ > T) return refused("q", "expected at most the " + number(T) + " tokens of k, got " + number(TQ));
  if (a.cu_seqlens && TQ != T)
    return refused("q", "expected the " + number(T) + " tokens of k with cu_seqlens, got " + number(TQ) +
                            "; cu_seqlens_q and cu_seqlens_k are for fewer");
  if (backward && (TQ != T || a.cu_seqlens_q))
    return refused("q", "gradients need a query for each of the " + number(T) +
                            " tokens of k, without cu_seqlens_q and cu_seqlens_k, got " + number(TQ));
  if (a.window_size > 0 && !a.g_swa) return refused("g_swa", "needed by window_size, but not given");
  if (a.block_indices) return {};
  if (!a.g_cmp) return refused("block_indices", "needed without g_cmp, which chooses them, but neither was given");
  if (a.block_counts) return refused("block_counts", "given without block_indices, whose entries it counts");
  return check_block_size(a.block_size, a.block_count);
}

template <typename A>
std::int64_t pooled(const A& a, const Dims& d) {
  const std::int64_t n = a.block_size;
  if (n < 1 || d["T"] < 0) return -1;
  if (!a.cu_seqlens) return (a.TK.value_or(d["T"]) + n - 1) / n;
  const TensorView& cu = a.cu_seqlens;
  if (cu.device.type != DeviceType::Cpu || cu.data == nullptr || cu.ndim != 1) return -1;
  std::int64_t blocks = 0;
  for (std::int64_t i = 0; i + 1 < cu.dim(0); ++i) {
    const std::int64_t length = read_index(cu, i + 1) - read_index(cu, i);
    if (length < 0) return -1;
    blocks += (length + n - 1) / n;
  }
  return blocks;
}

// Beside what the tables say of queries over pooled keys.
template <typename A>
Status check_pooled(const A& a, const Dims& d) {
  if (Status bad = check_query_groups(d); !bad) return bad;
  if (a.TK && a.cu_seqlens && *a.TK != a.q.dim(1))
    return refused("TK", "expected the " + number(a.q.dim(1)) + " tokens that cu_seqlens cuts, got " + number(*a.TK));
  if (a.TK && *a.TK < a.q.dim(1))
    return refused("TK", "expected at least the " + number(a.q.dim(1)) + " queries, got " + number(*a.TK));
  return {};
}

// Keys that the three branches read: all as means, some by selection; the window is left out.
double branch_flops(const Dims& d, double by_key, double by_value) {
  const double rows = static_cast<double>(d["B"] * d["T"] * d["HQ"]), T = static_cast<double>(d["T"]);
  const double keys = std::min(T, 64.0 * static_cast<double>(d["S"])) + T / 128.0;
  return 2.0 * rows * keys * (by_key * static_cast<double>(d["K"]) + by_value * static_cast<double>(d["V"]));
}

}  // namespace

void register_nsa_spec(Registry& r) {
  {
    using A = NsaArgs;
    using G = NsaBackwardArgs;
    OpSpec<A, G> s(kParallelNsa, kParallelNsaBackward, "nsa");
    const auto weight = [](const char* doc) {
      return ArgOptions{.types = Types::Float, .gen = {.kind = Gen::Kind::Sigmoid}, .doc = doc};
    };
    s.in("q", &A::q, "B TQ HQ K", &G::dq, {.doc = "queries: the last TQ of T tokens; gradients need TQ = T"})
        .in("k", &A::k, "B T H K", &G::dk, {.doc = "keys"})
        .in("v", &A::v, "B T H V", &G::dv, {.doc = "values"})
        .opt_in("g_cmp", &A::g_cmp, "B TQ HQ", &G::dg_cmp, weight("weight of the compressed branch; absent: none"))
        .opt_in("g_slc", &A::g_slc, "B TQ HQ", &G::dg_slc, weight("weight of the selected branch; absent = 1"))
        .opt_in("g_swa", &A::g_swa, "B TQ HQ", &G::dg_swa, weight("weight of the sliding branch"));
    s.opt_in("block_indices", &A::block_indices, "B TQ H S", nullptr,
             left_out("blocks that a query reads, -1 for none; absent: chosen", Types::Index));
    s.opt_in("block_counts", &A::block_counts, "B TQ H", nullptr,
             left_out("entries of a list that count; absent: all", Types::Index));
    s.flag("block_counts", &A::block_count, {.def = std::int64_t{16}, .min = 1}, "S: entries of a list");
    s.flag("block_size", &A::block_size, {.def = std::int64_t{64}, .min = 1}, "tokens of a block");
    s.flag("window_size", &A::window_size, {.def = std::int64_t{0}, .min = 0},
           "keys of the sliding branch, the query's own included; 0: none");
    s.flag("scale", &A::scale, "of the compressed and the selected branch; default K^(-1/2)");
    add_boundaries(s);
    ArgOptions queries = left_out("boundaries of the queries of packed sequences, B = 1", Types::Index);
    queries.cuts = "TQ";
    s.opt_in("cu_seqlens_q", &A::cu_seqlens_q, "N+1", nullptr, queries);
    s.opt_in("cu_seqlens_k", &A::cu_seqlens_k, "N+1", nullptr, left_out("of their keys", Types::Index));
    s.out("o", &A::o, "B TQ HQ V", &G::do_, {.doc = "output"});
    // With counts of their own lists may have any length.
    s.derive("S", [](const A& a, const Dims&) {
      return a.block_counts && a.block_indices && a.block_indices.ndim == 4 ? a.block_indices.dim(3) : a.block_count;
    });
    s.max_dim("V", 0).tolerance(0.005, {{"o", 0.004}});
    s.flops([](const Dims& d) { return branch_flops(d, 1.0, 1.0); },
            [](const Dims& d) { return branch_flops(d, 3.0, 2.0); });
    s.check([](const A& a, const Dims& d) { return check(a, d, false); });
    s.doc("Native sparse attention: compressed, selected and sliding branches.", kSource);
    FunctionSpec forward = s.take_forward(), backward = s.take_backward();
    backward.check = [](const void* a, const Dims& d) {
      return check(static_cast<const A&>(*static_cast<const G*>(a)), d, true);
    };
    r.add_function(std::move(forward));
    r.add_function(std::move(backward));
  }
  {
    using A = NsaCompressionArgs;
    using G = NsaCompressionBackwardArgs;
    OpSpec<A, G> s(kParallelNsaCompression, kParallelNsaCompressionBackward, "nsa");
    s.in("q", &A::q, "B T HQ K", &G::dq, {.doc = "queries"})
        .in("k_cmp", &A::k_cmp, "B C H K", &G::dk_cmp, {.doc = "means of the keys of each block"})
        .in("v_cmp", &A::v_cmp, "B C H V", &G::dv_cmp, {.doc = "means of the values"});
    s.flag("TK", &A::TK, {.min = 0}, "tokens of a dense sequence, the last of which are queries; default as many");
    s.flag("block_size", &A::block_size, {.def = std::int64_t{64}, .min = 1}, "tokens of a block");
    s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
    add_boundaries(s);
    s.derive("C", pooled<A>);
    s.out("o", &A::o, "B T HQ V", &G::do_, {.doc = "output; zeros where no block has passed"});
    s.out("lse", &A::lse, "B T HQ", nullptr, {.types = Types::Acc, .doc = "natural logarithm of the denominator"});
    s.max_dim("V", 0).tolerance(0.005).family_export();
    s.check(check_pooled<A>);
    s.doc("The compressed branch of native sparse attention, over pooled keys and values.", kSource);
    r.add(s);
  }
  {
    using A = NsaTopkArgs;
    OpSpec<A> s(kParallelNsaTopk, "nsa");
    s.in("q", &A::q, "B T HQ K", nullptr, {.doc = "queries"})
        .in("k_cmp", &A::k_cmp, "B C H K", nullptr, {.doc = "means of the keys of each block"});
    s.flag("TK", &A::TK, {.min = 0}, "tokens of a dense sequence, the last of which are queries; default as many");
    s.flag("block_counts", &A::block_count, {.def = std::int64_t{16}, .min = 1}, "S: entries of a list");
    s.flag("block_size", &A::block_size, {.def = std::int64_t{64}, .min = 1}, "tokens of a block");
    s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
    add_boundaries(s);
    s.derive("C", pooled<A>);
    s.derive("S", [](const A& a, const Dims&) { return a.block_count; });
    s.out("block_indices", &A::block_indices, "B T H S", nullptr,
          {.types = Types::Index, .doc = "blocks that a query reads, in increasing order, then -1"});
    s.family_export();
    s.check([](const A& a, const Dims& d) {
      if (Status bad = check_pooled(a, d); !bad) return bad;
      return check_block_size(a.block_size, a.block_count);
    });
    s.doc("The choice of blocks of native sparse attention, over pooled keys.", kSource);
    r.add(s);
  }
}

}  // namespace fla
