#include "fla/ops/spec/attn_spec.h"
#include "fla/ops/wall_attn/wall_attn.h"

namespace fla {

namespace {

constexpr const char* kSource = "flash-linear-attention, fla.ops.wall_attn";

std::int64_t chunks(const Dims& d, std::int64_t size) {
  return d["T"] < 0 || size < 1 ? -1 : (d["T"] + size - 1) / size;
}

}  // namespace

void register_wall_attn_spec(Registry& r) {
  {
    using A = WallAttnArgs;
    using G = WallAttnBackwardArgs;
    OpSpec<A, G> s(kParallelWallAttn, kParallelWallAttnBackward, "wall_attn");
    add_grouped_qkv(s);
    s.in("g", &A::g, "B T HQ K", &G::dg,
         {.types = Types::Float,
          .gen = {.kind = Gen::Kind::LogSigmoid},
          .doc = "natural log decay of a channel, at most 0"});
    s.opt_in("g_scalar", &A::g_scalar, "B T HQ", &G::dg_scalar,
             left_out("natural log gate, added to the logit; absent = 0"));
    s.opt_in("sink_bias", &A::sink_bias, "HQ", &G::dsink_bias, left_out("a logit of every query, without a value"));
    s.flag("scale", &A::scale, "multiplies the decayed product; default K^(-1/2)");
    add_window(s, 1);
    add_boundaries(s);
    s.max_dim("V", 0).tolerance(0.005).flops(attn_forward_flops, attn_backward_flops);
    s.check([](const A&, const Dims& d) { return check_query_groups(d); });
    s.doc("Softmax attention whose keys decay by channel inside the logit.", kSource);
    r.add(s);
  }
  {
    using A = WallAttnDecodeArgs;
    OpSpec<A> s(kParallelWallAttnDecode, "wall_attn");
    s.in("q", &A::q, "B Q HQ K", nullptr, {.doc = "queries, each of which sees the whole cache"})
        .in("v", &A::v, "B T H V", nullptr, {.doc = "cached values"})
        .in("p_curr", &A::p_curr, "B Q HQ K", nullptr,
            {.types = Types::Float, .doc = "base-2 prefix of the queries' decay"})
        .in("k_tilde", &A::k_tilde, "B T HQ K", nullptr, {.types = Types::Float, .doc = "cached keys, rescaled"})
        .in("r_cache", &A::r_cache, "B NC HQ K", nullptr,
            {.types = Types::Float, .doc = "base-2 prefix at the first row of each chunk"})
        .opt_in("sink_bias", &A::sink_bias, "HQ", nullptr, left_out("natural logit of every query, without a value"));
    s.flag("scale", &A::scale, {.required = true}, "multiplies the decayed product");
    s.flag("cache_chunk_size", &A::cache_chunk_size, {.required = true, .min = 1}, "tokens that share an anchor");
    s.opt_in("g_scalar_cumsum", &A::g_scalar_cumsum, "B T HQ", nullptr,
             left_out("base-2 prefix of the scalar gate; the queries are its last rows"));
    s.out("o", &A::o, "B Q HQ V", nullptr, {.doc = "output"});
    s.out("lse", &A::lse, "B Q HQ", nullptr, {.types = Types::Acc, .doc = "base-2 logarithm of the denominator"});
    // A cache may have room for more chunks than are in use.
    s.derive("NC", [](const A& a, const Dims& d) {
      const std::int64_t used = chunks(d, a.cache_chunk_size);
      return a.r_cache && a.r_cache.ndim == 4 ? std::max(used, a.r_cache.dim(1)) : used;
    });
    s.bench_flag("scale", 0.25).bench_flag("cache_chunk_size", std::int64_t{32});
    s.max_dim("V", 0).tolerance(0.005);
    s.check([](const A& a, const Dims& d) {
      if (Status bad = check_query_groups(d); !bad) return bad;
      if (a.g_scalar_cumsum && a.q.dim(1) > a.v.dim(1))
        return refused("q", "expected at most the " + std::to_string(a.v.dim(1)) + " rows of the cache, got " +
                                std::to_string(a.q.dim(1)));
      return Status();
    });
    s.doc("Decoding over a cache of rescaled keys, without a mask.", kSource);
    r.add(s);
  }
  {
    using A = WallCacheArgs;
    OpSpec<A> s(kBuildWallKvCache, "wall_attn");
    s.in("k", &A::k, "B T H K", nullptr, {.doc = "keys"})
        .in("g_cumsum", &A::g_cumsum, "B T HQ K", nullptr,
            {.types = Types::Float, .doc = "base-2 prefix of the decay"});
    s.flag("chunk_size", &A::chunk_size, {.required = true, .min = 1}, "tokens that share an anchor");
    s.derive("NC", [](const A& a, const Dims& d) { return chunks(d, a.chunk_size); });
    s.out("k_tilde", &A::k_tilde, "B T HQ K", nullptr, {.doc = "keys times 2^(anchor - prefix)"});
    s.out("r_cache", &A::r_cache, "B NC HQ K", nullptr,
          {.types = Types::Like, .like = "g_cumsum", .doc = "the prefix at the first row of each chunk"});
    s.bench_flag("chunk_size", std::int64_t{32});
    s.tolerance(0.005).family_export();
    s.check([](const A&, const Dims& d) {
      if (d["H"] > 0 && d["HQ"] % d["H"] != 0)
        return refused("g_cumsum", "expected a head count that is a multiple of k's " + std::to_string(d["H"]) +
                                       ", got " + std::to_string(d["HQ"]));
      return Status();
    });
    s.doc("Keys and anchors for parallel_wall_attn_decode.", kSource);
    r.add(s);
  }
}

}  // namespace fla
