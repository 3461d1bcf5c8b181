#include "fla/ops/spec/attn_spec.h"
#include "fla/ops/attn/attn.h"
#include "fla/ops/spec/delta_spec.h"

namespace fla {

namespace {

constexpr const char* kSource =
    "Vaswani et al., Attention Is All You Need, 2017; Xiao et al., Efficient Streaming Language Models with Attention "
    "Sinks, 2024";
constexpr std::int64_t kTile = 128;  // rows that an entry of chunk_indices stands for

Status check(const AttnArgs& a, const Dims& d) {
  if (Status s = check_query_groups(d); !s) return s;
  if (a.window_size == 0 && !a.sink_bias)
    return refused("window_size", "expected at least 1 without sink_bias, got 0: no query would see anything");
  return check_chunk_indices(a.chunk_indices, a.cu_seqlens, kTile);
}

// Tables on a device cannot be looked into.
Status check_cache(const AttnCacheArgs& a, const Dims& d) {
  if (Status s = check_query_groups(d, "k_cache"); !s) return s;
  const std::int64_t B = d["B"], P = d["P"], T = d["T"];
  const auto number = [](std::int64_t n) { return std::to_string(n); };
  if (!a.block_table && P != B)
    return refused("k_cache",
                   "expected a page for each of " + number(B) + " sequences without block_table, got " + number(P));
  std::int64_t room = T;
  if (a.block_table && __builtin_mul_overflow(room, d["M"], &room))
    return refused("block_table", "more tokens than 64 bits can count");
  const auto on_host = [](const TensorView& t) { return t && t.device.type == DeviceType::Cpu; };
  for (std::int64_t n = 0; n < B; ++n) {
    std::int64_t length = room;
    if (on_host(a.lengths)) length = read_index(a.lengths, n);
    if (length < 0 || length > room)
      return refused("lengths", "sequence " + number(n) + ": expected 0 to " + number(room) +
                                    " tokens, for which there is room, got " + number(length));
    if (!on_host(a.block_table) || (a.lengths && !on_host(a.lengths))) continue;
    for (std::int64_t m = 0; T > 0 && m < (length + T - 1) / T; ++m)
      if (const std::int64_t page = read_index(a.block_table, n, m); page < 0 || page >= P)
        return refused("block_table", "sequence " + number(n) + ", column " + number(m) +
                                          ": expected a page from 0 to " + number(P - 1) + ", got " + number(page));
  }
  return {};
}

}  // namespace

void register_attn_spec(Registry& r) {
  {
    using A = AttnArgs;
    using G = AttnBackwardArgs;
    OpSpec<A, G> s(kParallelAttn, kParallelAttnBackward, "attn");
    add_grouped_qkv(s);
    s.opt_in("g", &A::g, "B T HQ", &G::dg, left_out("natural log decay, any sign; absent = 0"));
    s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
    add_window(s, 0);
    add_boundaries(s);
    s.derive("NT", [](const A& a, const Dims& d) { return count_chunks(a.cu_seqlens, d, kTile); });
    s.opt_in("chunk_indices", &A::chunk_indices, "NT 2", nullptr,
             left_out("(sequence, tile of 128 rows) of every tile; changes no value", Types::Index));
    s.opt_in("sink_bias", &A::sink_bias, "HQ", &G::dsink_bias, left_out("a logit of every query, without a value"));
    s.tolerance(0.005).flops(attn_forward_flops, attn_backward_flops).check(check);
    s.max_dim("V", 0);
    s.doc("Causal softmax attention with an optional gate, window and sink.", kSource);
    r.add(s);
  }
  {
    using A = AttnDecodeArgs;
    OpSpec<A> s(kAttnDecodingOneStep, "attn");
    s.in("q", &A::q, "B N HQ K", nullptr, {.doc = "a query for each sequence: its last position"})
        .in("k", &A::k, "B T H K", nullptr, {.doc = "keys"})
        .in("v", &A::v, "B T H V", nullptr, {.doc = "values"})
        .opt_in("g", &A::g, "B T HQ", nullptr, left_out("natural log decay; absent = 0"));
    s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
    s.in("cu_seqlens", &A::cu_seqlens, "N+1", nullptr, left_out("boundaries of the sequences, B = 1", Types::Index));
    s.flag("do_gate_scale", &A::do_gate_scale, false, "g is multiplied by scale");
    s.opt_in("sink_bias", &A::sink_bias, "HQ", nullptr, left_out("a logit of every query, without a value"));
    s.out("o", &A::o, "B N HQ V", nullptr, {.doc = "output"});
    s.max_dim("V", 0).tolerance(0.005).family_export();
    s.check([](const A&, const Dims& d) { return check_query_groups(d); });
    s.doc("Softmax attention of one query for each packed sequence: for decoding.", kSource);
    r.add(s);
  }
  {
    using A = AttnCacheArgs;
    OpSpec<A> s(kAttnDecode, "attn");
    s.in("q", &A::q, "B TQ HQ K", nullptr, {.doc = "queries: the last positions of each sequence"})
        .in("k_cache", &A::k_cache, "P T H K", nullptr, {.doc = "keys in pages of T tokens, the queries' own included"})
        .in("v_cache", &A::v_cache, "P T H V", nullptr, {.doc = "their values"})
        .opt_in("g_cache", &A::g_cache, "P T HQ", nullptr, left_out("their natural log decays; absent = 0"));
    s.flag("scale", &A::scale, "multiplies <q, k>; default K^(-1/2)");
    add_window(s, 1);
    s.opt_in("block_table", &A::block_table, "B M", nullptr,
             left_out("a sequence's pages in order; absent: page n is sequence n", Types::Index));
    s.opt_in("lengths", &A::lengths, "B", nullptr,
             left_out("tokens of each sequence; absent: all of its pages", Types::Index));
    s.opt_in("sink_bias", &A::sink_bias, "HQ", nullptr, left_out("a logit of every query, without a value"));
    s.out("o", &A::o, "B TQ HQ V", nullptr, {.doc = "output"});
    s.max_dim("V", 0).tolerance(0.005).family_export();
    s.check(check_cache);
    s.doc("Softmax attention of the last queries over a cache by slots or in pages: for decoding.", kSource);
    r.add(s);
  }
}

}  // namespace fla
