#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>
#include "fla/ops/common/delta_cpu.h"
using namespace fla;
using i64 = std::int64_t;
int main(int argc, char** argv) {
  const char* what = argv[1];
  i64 T = argc > 2 ? atoi(argv[2]) : 4096, H = 16, D = argc > 3 ? atoi(argv[3]) : 128;
  int mode = argc > 4 ? atoi(argv[4]) : 1;
  int reps = argc > 5 ? atoi(argv[5]) : 5;
  std::mt19937 r(1);
  std::normal_distribution<float> n;
  std::uniform_real_distribution<float> u;
  auto mk = [&](i64 sz) {
    std::vector<float> v((size_t)sz);
    for (auto& x : v) x = n(r);
    return v;
  };
  auto q = mk(T * H * D), k = mk(T * H * D), v = mk(T * H * D), g = mk(T * H), gk = mk(T * H * D), b = mk(T * H),
       o = mk(T * H * D), s = mk(H * D * D), st = mk(H * D * D);
  for (auto& x : g) x = -0.1f * u(r);
  for (auto& x : gk) x = -0.1f * u(r);
  for (auto& x : b) x = u(r);
  for (i64 i = 0; i < T * H; ++i) {
    float t = 0;
    for (i64 c = 0; c < D; ++c) t += k[i * D + c] * k[i * D + c];
    t = 1 / std::sqrt(t);
    for (i64 c = 0; c < D; ++c) k[i * D + c] *= t;
  }
  DeltaProblem p;
  p.B = p.N = 1;
  p.T = T;
  p.H = p.HV = H;
  p.K = p.V = D;
  p.scale = 1 / std::sqrt((double)D);
  p.erase = Erase::Decayed;
  p.q = TensorView(q.data(), {1, T, H, D});
  p.k = TensorView(k.data(), {1, T, H, D});
  p.v = TensorView(v.data(), {1, T, H, D});
  p.beta = TensorView(b.data(), {1, T, H});
  if (!strcmp(what, "gdn")) p.g = TensorView(g.data(), {1, T, H});
  if (!strcmp(what, "kda") || !strcmp(what, "dplr")) p.gk = TensorView(gk.data(), {1, T, H, D});
  std::vector<float> ab;
  if (!strcmp(what, "dplr") || !strcmp(what, "iplr")) {
    ab = k;
    for (auto& x : ab) x *= -0.7f;
    p.erase = Erase::General;
    p.a = p.k;
    p.b = TensorView(ab.data(), {1, T, H, D});
    p.beta = {};
  }
  if (!strcmp(what, "delta")) p.erase = Erase::Plain;
  p.h0 = TensorView(s.data(), {1, H, D, D});
  ThreadPool pool(1);
  auto f = p;
  f.o = TensorView(o.data(), {1, T, H, D});
  f.ht = TensorView(st.data(), {1, H, D, D});
  auto time = [&](auto&& fn) {
    std::vector<double> t;
    for (int i = 0; i < reps; ++i) {
      auto cpu = [] {
        timespec x;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &x);
        return x.tv_sec * 1e3 + x.tv_nsec * 1e-6;
      };
      double a = cpu();
      fn();
      t.push_back(cpu() - a);
    }
    std::sort(t.begin(), t.end());
    return std::pair{t[0], t[t.size() / 2]};
  };
  if (mode & 1) {
    std::vector<std::byte> ws(cpu::delta_chunk_forward_workspace(f, 1));
    auto [a, m] = time([&] { (void)cpu::delta_chunk_forward(f, pool, ws).ok(); });
    printf("%s T%ld D%ld chunk fwd min %.3f med %.3f ms\n", what, T, D, a, m);
  }
#ifdef HAVE_STEP
  if (mode & 4) {
    std::vector<std::byte> ws(cpu::delta_step_forward_workspace(f, 1));
    auto [a, m] = time([&] { (void)cpu::delta_step_forward(f, pool, ws).ok(); });
    printf("%s T%ld D%ld step fwd min %.3f med %.3f ms\n", what, T, D, a, m);
  }
#endif
#ifdef HAVE_BWD
  if (mode & 2) {
    auto d1 = mk(T * H * D), d2 = d1, d3 = d1, d4 = d1, d5 = d1, d6 = d1;
    auto e = mk(T * H), e2 = e;
    auto ds = s;
    p.do_ = f.o;
    p.dq = TensorView(d1.data(), {1, T, H, D});
    p.dk = TensorView(d2.data(), {1, T, H, D});
    p.dv = TensorView(d3.data(), {1, T, H, D});
    if (p.beta) p.dbeta = TensorView(e.data(), {1, T, H});
    if (p.g) p.dg = TensorView(e2.data(), {1, T, H});
    if (p.gk) p.dgk = TensorView(d4.data(), {1, T, H, D});
    if (p.a) {
      p.da = TensorView(d5.data(), {1, T, H, D});
      p.db = TensorView(d6.data(), {1, T, H, D});
    }
    p.dh0 = TensorView(ds.data(), {1, H, D, D});
    std::vector<std::byte> ws(cpu::delta_chunk_backward_workspace(p, 1));
    auto [a, m] = time([&] { (void)cpu::delta_chunk_backward(p, pool, ws).ok(); });
    printf("%s T%ld D%ld chunk bwd min %.3f med %.3f ms ws %.1f MB\n", what, T, D, a, m, (double)ws.size() / 1e6);
  }
#endif
}
