#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>
#include "fla/ops/common/delta_cpu.h"
using namespace fla;
using i64 = std::int64_t;
int main() {
  std::mt19937 r(3);
  std::normal_distribution<float> n;
  std::uniform_real_distribution<float> u;
  int bad = 0;
  for (int e = 0; e < 5; ++e)
    for (int g = 0; g < 4; ++g)
      for (int step = 0; step < 2; ++step)
        for (i64 t1 : {1, 15, 16, 17, 40, 63}) {
          const i64 T = 70, H = 3, K = 40, V = 50;
          auto mk = [&](i64 sz, float s) {
            std::vector<float> v((size_t)sz);
            for (auto& x : v) x = n(r) * s;
            return v;
          };
          const float s = 1 / std::sqrt(40.F);
          auto q = mk(T * H * K, 1), k = mk(T * H * K, s), v = mk(T * H * V, 1), a = mk(T * H * K, s),
               b = mk(T * H * K, -0.7F * s), be = mk(T * H, 0), gh = be, gk = mk(T * H * K, 0), eb = gk,
               ew = mk(T * H * V, 0), st = mk(H * K * V, 1);
          for (auto& x : be) x = u(r);
          for (auto& x : eb) x = u(r);
          for (auto& x : ew) x = u(r);
          auto gate = [&] {
            float x = u(r);
            return x < 0.4F ? 0.F : x < 0.8F ? -0.3F * u(r) : -1000 * u(r);
          };
          for (auto& x : gh) x = gate();
          for (auto& x : gk) x = gate();
          auto run = [&](i64 len, i64 h0, i64 hn, bool alias) {
            std::vector<float> o(T * H * V, NAN), ht(H * K * V, NAN), hin = st;
            DeltaProblem p;
            p.B = p.N = 1;
            p.T = len;
            p.H = p.HV = hn;
            p.K = K;
            p.V = V;
            p.scale = 0.3;
            p.erase = Erase(e);
            auto view = [&](std::vector<float>& x, i64 d) {
              TensorView t(x.data(), {1, T, H, d});
              t.shape[1] = len;
              t.shape[2] = hn;
              t.data = x.data() + h0 * d;
              return t;
            };
            auto view3 = [&](std::vector<float>& x) {
              TensorView t(x.data(), {1, T, H});
              t.shape[1] = len;
              t.shape[2] = hn;
              t.data = x.data() + h0;
              return t;
            };
            p.q = view(q, K);
            p.k = view(k, K);
            p.v = view(v, V);
            p.o = view(o, V);
            if (e < 3) p.beta = view3(be);
            if (e == 2) p.p = view(a, K);
            if (e == 3) {
              p.eb = view(eb, K);
              p.ew = view(ew, V);
            }
            if (e == 4) {
              p.a = view(a, K);
              p.b = view(b, K);
            }
            if (g == 1) p.g = view3(gh);
            if (g >= 2) p.gk = view(gk, K);
            if (g == 3) p.g = view3(gh);
            p.h0 = TensorView(hin.data() + h0 * K * V, {1, hn, K, V});
            p.ht = alias ? p.h0 : TensorView(ht.data() + h0 * K * V, {1, hn, K, V});
            ThreadPool pool(hn == 1 ? 4 : 1);
            std::vector<std::byte> ws(step ? cpu::delta_step_forward_workspace(p, pool.size())
                                           : cpu::delta_chunk_forward_workspace(p, pool.size()),
                                      std::byte{0xff});
            Status x = step ? cpu::delta_step_forward(p, pool, ws) : cpu::delta_chunk_forward(p, pool, ws);
            if (!x.ok()) puts(x.message().c_str());
            return std::pair{o, alias ? hin : ht};
          };
          auto [o, h] = run(T, 0, H, false);
          auto [oa, ha] = run(T, 0, H, true);
          if (memcmp(o.data(), oa.data(), o.size() * 4) || memcmp(h.data(), ha.data(), h.size() * 4)) {
            ++bad;
            printf("alias e%d g%d step%d\n", e, g, step);
          }
          auto [o1, h1] = run(T, 1, 1, false);
          for (i64 t = 0; t < T; ++t)
            if (memcmp(&o[(t * H + 1) * V], &o1[(t * H + 1) * V], V * 4)) {
              ++bad;
              printf("head e%d g%d step%d\n", e, g, step);
              break;
            }
          if (memcmp(&h[K * V], &h1[K * V], K * V * 4)) {
            ++bad;
            puts("head state");
          }
          auto [o2, h2] = run(t1, 0, H, false);
          if (memcmp(o.data(), o2.data(), t1 * H * V * 4)) {
            ++bad;
            printf("prefix e%d g%d step%d t%ld\n", e, g, step, t1);
          }
          for (auto* x : {&q, &k, &v, &a, &b, &gk, &eb, &ew}) {
            i64 w = (i64)x->size() / T;
            for (i64 i = t1 * w; i < T * w; ++i) (*x)[i] = -std::fabs(100 * n(r));
          }
          for (auto* x : {&be, &gh})
            for (i64 i = t1 * H; i < T * H; ++i) (*x)[i] = -50;
          auto [o3, h3] = run(T, 0, H, false);
          if (memcmp(o.data(), o3.data(), t1 * H * V * 4)) {
            ++bad;
            printf("later e%d g%d step%d t%ld\n", e, g, step, t1);
          }
        }
  printf("%d bad\n", bad);
  return bad != 0;
}
