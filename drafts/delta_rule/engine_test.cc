#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>
#include "fla/ops/common/delta_cpu.h"
#include "fla/ops/common/delta_ref.h"
#include "hwy/targets.h"
using namespace fla;
using i64 = std::int64_t;
struct Buf {
  std::vector<std::byte> mem;
  TensorView view;
};
static std::mt19937_64 rng(7);
static double nrm() { return std::normal_distribution<double>()(rng); }
static double uni() { return std::uniform_real_distribution<double>()(rng); }
// layout: 0 contiguous, 1: last axis stride 2, reversed axis 1
static void make(Buf& b, DType t, std::vector<i64> dims, int layout, bool poison = true) {
  i64 n = 1;
  for (i64 d : dims) n *= d > 0 ? d : 1;
  const i64 mul = layout ? 2 : 1, sz = (i64)size_of(t);
  b.mem.assign((size_t)(n * mul * sz + 64), std::byte{0xff});
  (void)poison;
  b.view = TensorView(b.mem.data(), t, std::span<const i64>(dims.data(), dims.size()));
  if (layout) {
    for (int i = 0; i < b.view.ndim; ++i) b.view.stride[i] *= 2;
    if (b.view.ndim > 1 && dims[1] > 0) {
      b.view.data = (std::byte*)b.view.data + (dims[1] - 1) * b.view.stride[1] * sz;
      b.view.stride[1] = -b.view.stride[1];
    }
  }
}
static void each(const TensorView& v, const std::function<void(std::byte*)>& f) {
  i64 n = v.numel();
  std::vector<i64> ix((size_t)std::max(v.ndim, 1), 0);
  for (i64 c = 0; c < n; ++c) {
    i64 off = 0;
    for (int i = 0; i < v.ndim; ++i) off += ix[i] * v.stride[i];
    f((std::byte*)v.data + off * (i64)size_of(v.dtype));
    for (int i = v.ndim - 1; i >= 0; --i) {
      if (++ix[i] < v.shape[i]) break;
      ix[i] = 0;
    }
  }
}
static double rd(const std::byte* p, DType t) {
  switch (t) {
    case DType::F32: return *(const float*)p;
    case DType::F64: return *(const double*)p;
    case DType::BF16: return to_float(*(const bf16*)p);
    case DType::F16: return to_float(*(const f16*)p);
    default: return 0;
  }
}
static void wr(std::byte* p, DType t, double x) {
  switch (t) {
    case DType::F32: *(float*)p = (float)x; break;
    case DType::F64: *(double*)p = x; break;
    case DType::BF16: *(bf16*)p = to_bf16((float)x); break;
    case DType::F16: *(f16*)p = to_f16((float)x); break;
    default: break;
  }
}
static std::vector<double> values(const TensorView& v) {
  std::vector<double> r;
  each(v, [&](std::byte* p) { r.push_back(rd(p, v.dtype)); });
  return r;
}

struct Cfg {
  std::string name;
  i64 B = 1, T = 37, H = 2, HV = 2, K = 24, V = 20, R = 1;
  Erase erase = Erase::Decayed;
  int gate = 0 /*0 none 1 head 2 channel 3 both*/;
  int act = 0;
  bool A = true, bias = true;
  bool norm = false;
  double sig = 0;
  int w = 0;
  bool p = true;
  bool reverse = false;
  std::vector<i64> cu;
  bool state = true;
  int layout = 0;
  DType io = DType::F32;
  int regime = 0;
  bool gv = false, vbeta = false, beta = true;
  bool swap = false;
  bool nodo = false;
};
static int fails = 0;
static std::map<std::string, double> worst;
int main(int argc, char** argv) {
  int mode = argc > 1 ? atoi(argv[1]) : 0;  // bit0 chunk fwd, bit1 chunk bwd, bit2 step fwd, bit3 step bwd
  if (getenv("TGT")) hwy::SetSupportedTargetsForTest(strtoll(getenv("TGT"), nullptr, 0));
  const char* only = argc > 2 ? argv[2] : nullptr;
  std::vector<Cfg> cs;
  auto add = [&](Cfg c) { cs.push_back(c); };
  struct P {
    const char* n;
    Erase e;
    int g;
  };
  for (P q : {P{"plain0", Erase::Plain, 0}, P{"plainH", Erase::Plain, 1}, P{"gdn", Erase::Decayed, 1},
              P{"kda", Erase::Decayed, 2}, P{"comba", Erase::Other, 1}, P{"combaC", Erase::Other, 2},
              P{"gdn2", Erase::Gated, 2}, P{"gdn2H", Erase::Gated, 1}, P{"iplr", Erase::General, 0},
              P{"genH", Erase::General, 1}, P{"dplr", Erase::General, 2}}) {
    Cfg c;
    c.erase = q.e;
    c.gate = q.g;
    c.name = q.n;
    for (int reg = 0; reg < (q.g ? 5 : 1); ++reg) {
      Cfg d = c;
      d.regime = reg;
      d.name += "_r" + std::to_string(reg);
      d.T = 83;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_gva";
      d.HV = 4;
      d.H = 2;
      d.B = 2;
      d.T = 70;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_var";
      d.T = 150;
      d.cu = {0, 0, 1, 16, 16, 17, 81, 150, 150};
      d.layout = 1;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_norm";
      d.norm = true;
      d.sig = 2;
      d.T = 64;
      d.K = 40;
      d.V = 70;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_bf16";
      d.io = DType::BF16;
      d.T = 33;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_f16";
      d.io = DType::F16;
      d.T = 33;
      d.layout = 1;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_nostate";
      d.state = false;
      d.T = 32;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_rev";
      d.reverse = true;
      d.swap = true;
      d.T = 47;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_big";
      d.K = 128;
      d.V = 128;
      d.T = 200;
      d.H = d.HV = 1;
      d.norm = true;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_heads";
      d.H = 4;
      d.HV = 8;
      d.T = 140;
      d.K = 16;
      d.V = 33;
      add(d);
      d.H = d.HV = 9;
      d.name += "9";
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_T0";
      d.T = 0;
      add(d);
    }
    {
      Cfg d = c;
      d.name += "_T1";
      d.T = 1;
      add(d);
    }
    if (q.e != Erase::General) {
      Cfg d = c;
      d.name += "_w";
      d.w = 1;
      d.HV = 4;
      add(d);
      d.w = 2;
      d.name += "v";
      add(d);
    }
    if (q.e != Erase::General) {
      Cfg d = c;
      d.name += "_nobeta";
      d.beta = false;
      d.HV = 4;
      add(d);
    }
    if (q.g)
      for (int act = 1; act < 3; ++act) {
        Cfg d = c;
        d.act = act;
        d.name += "_act" + std::to_string(act);
        d.cu = {0, 20, 53, 90};
        d.T = 90;
        d.HV = 4;
        add(d);
        d.A = false;
        d.bias = false;
        d.name += "n";
        if (act == 2) add(d);
      }
    if (q.e == Erase::Plain || q.e == Erase::Decayed)
      for (i64 R = 2; R < 4; ++R) {
        Cfg d = c;
        d.R = R;
        d.T = 30;
        d.norm = true;
        d.name += "_R" + std::to_string(R);
        add(d);
        d.cu = {0, 7, 7, 30};
        d.T = 30;
        d.name += "v";
        d.sig = 1;
        if (q.g) d.act = 1;
        add(d);
      }
    if (q.e == Erase::Other) {
      Cfg d = c;
      d.p = false;
      d.name += "_nop";
      d.norm = true;
      add(d);
    }
    if (q.g) {
      Cfg d = c;
      d.name += "_both";
      d.gate = 3;
      d.act = 1;
      add(d);
    }
    {
      Cfg d = c;
      d.gv = true;
      d.HV = 4;
      d.name += "_gv";
      add(d);
      d.vbeta = true;
      d.sig = 1;
      d.name += "vb";
      d.cu = {0, 5, 5, 37};
      add(d);
      d.gv = false;
      d.name += "o";
      d.cu.clear();
      d.T = 70;
      d.gate = q.g ? 3 : 0;
      add(d);
    }
  }
  for (Cfg& c : cs) {
    if (c.erase == Erase::Gated || c.erase == Erase::General) c.sig = 0;
    if (only && c.name.find(only) == std::string::npos) continue;
    const bool stepOnly = c.gv || c.vbeta;
    const bool isv = !c.cu.empty();
    const i64 B = isv ? 1 : c.B, N = isv ? (i64)c.cu.size() - 1 : B;
    DeltaProblem p;
    p.B = B;
    p.T = c.T;
    p.H = std::min(c.H, c.HV);
    p.HV = c.HV;
    p.K = c.K;
    p.V = c.V;
    p.N = N;
    p.R = c.R;
    p.reverse = c.reverse;
    p.scale = 0.3;
    p.erase = c.erase;
    if (isv) p.cu_seqlens = TensorView(c.cu.data(), {(i64)c.cu.size()});
    std::map<std::string, Buf> in;
    auto inp = [&](const char* n, TensorView& slot, DType t, std::vector<i64> dims, std::function<double()> g) {
      Buf& b = in[n];
      make(b, t, dims, c.layout);
      each(b.view, [&](std::byte* q) { wr(q, t, g()); });
      slot = b.view;
    };
    const i64 T = c.T, TR = c.T * c.R, H = p.H, HV = c.HV, K = c.K, V = c.V;
    const double ks = c.norm ? 1 : 1 / std::sqrt((double)K);
    auto key = [&] { return nrm() * ks; };
    inp("q", p.q, c.io, {B, T, H, K}, nrm);
    inp("k", p.k, c.io, {B, TR, H, K}, key);
    inp("v", p.v, c.io, {B, TR, HV, V}, nrm);
    if (c.erase != Erase::General && c.erase != Erase::Gated && c.beta) {
      auto bt = [&] { return c.sig ? nrm() : uni(); };
      if (c.vbeta)
        inp("beta", p.beta, DType::F32, {B, TR, HV, V}, bt);
      else
        inp("beta", p.beta, DType::F32, {B, TR, HV}, bt);
    }
    if (c.erase == Erase::Other && c.p) inp("p", p.p, c.io, {B, T, H, K}, key);
    if (c.erase == Erase::Gated) {
      inp("eb", p.eb, c.io, {B, T, HV, K}, uni);
      inp("ew", p.ew, c.io, {B, T, HV, V}, uni);
    }
    if (c.erase == Erase::General) {
      auto s = [&] { return nrm() / std::sqrt((double)K); };
      inp("a", p.a, c.io, {B, T, H, K}, s);
      inp("b", p.b, c.io, {B, T, H, K}, [&] { return -0.7 * s(); });
    }
    if (c.w) inp("w", p.w, DType::F32, {B, T, c.w == 2 ? HV : H, K}, [&] { return nrm() / std::sqrt((double)K); });
    auto gate = [&] {
      switch (c.regime) {
        case 0: return -0.1 * std::fabs(nrm());
        case 1: return -5.0 * uni();
        case 2: return uni() < 0.5 ? 0.0 : -1000.0 * uni();
        case 3: return uni() < 0.1 ? -300.0 : -0.01;
        default: return uni() < 0.3 ? -20.0 * uni() : 0.0;
      }
    };
    auto graw = [&] { return c.act ? 2 * nrm() : gate(); };
    if (c.gate & 1) inp("g", p.g, DType::F32, {B, T, HV}, graw);
    if (c.gate & 2)
      inp("gk", p.gk, DType::F32, {B, T, HV, K},
          c.gate == 3 ? std::function<double()>(gate) : std::function<double()>(graw));
    if (c.gv) inp("gv", p.gv, DType::F32, {B, T, HV, V}, gate);
    if (c.act) {
      p.gate.kind = c.act == 1 ? GateActivation::Kind::Softplus : GateActivation::Kind::Bounded;
      p.gate.lower_bound = c.act == 2 ? -5 : 0;
      if (c.A) inp("A_log", p.gate.A_log, DType::F32, {HV}, [&] { return 0.5 * nrm(); });
      if (c.bias) {
        if (c.gate & 1)
          inp("dt_bias", p.gate.dt_bias, DType::F32, {HV}, nrm);
        else
          inp("dt_bias", p.gate.dt_bias, DType::F32, {HV, K}, nrm);
      }
    }
    p.normalize_q = p.normalize_k = c.norm;
    p.beta_sigmoid = c.sig;
    auto sw = [&](TensorView v) {
      if (c.swap) {
        std::swap(v.shape[2], v.shape[3]);
        std::swap(v.stride[2], v.stride[3]);
      }
      return v;
    };
    std::vector<i64> sd = c.swap ? std::vector<i64>{N, HV, V, K} : std::vector<i64>{N, HV, K, V};
    if (c.state) {
      inp("h0", p.h0, DType::F32, sd, nrm);
      p.h0 = sw(p.h0);
    }
    const DeltaProblem base = p;
    struct Out {
      std::string n;
      TensorView DeltaProblem::*m;
      DType t;
      std::vector<i64> dims;
      bool state;
    };
    std::vector<Out> fo{{"o", &DeltaProblem::o, c.io, {B, T, HV, V}, false},
                        {"ht", &DeltaProblem::ht, DType::F32, sd, true}};
    if (!stepOnly) {
      i64 nt = 0;
      if (isv)
        for (i64 n = 0; n < N; ++n) nt += (c.cu[n + 1] - c.cu[n] + 15) / 16;
      else
        nt = (T + 15) / 16;
      fo.push_back({"h", &DeltaProblem::h, DType::F32, {B, nt, HV, K, V}, false});
    }
    std::vector<Out> bo;
    auto g = [&](const char* n, TensorView DeltaProblem::*src, TensorView DeltaProblem::*dst) {
      const TensorView& s = base.*src;
      if (!s) return;
      bo.push_back({n, dst, s.dtype, std::vector<i64>(s.shape.begin(), s.shape.begin() + s.ndim), false});
    };
    g("dq", &DeltaProblem::q, &DeltaProblem::dq);
    g("dk", &DeltaProblem::k, &DeltaProblem::dk);
    g("dv", &DeltaProblem::v, &DeltaProblem::dv);
    g("dbeta", &DeltaProblem::beta, &DeltaProblem::dbeta);
    g("dp", &DeltaProblem::p, &DeltaProblem::dp);
    g("deb", &DeltaProblem::eb, &DeltaProblem::deb);
    g("dew", &DeltaProblem::ew, &DeltaProblem::dew);
    g("da", &DeltaProblem::a, &DeltaProblem::da);
    g("db", &DeltaProblem::b, &DeltaProblem::db);
    g("dw", &DeltaProblem::w, &DeltaProblem::dw);
    g("dg", &DeltaProblem::g, &DeltaProblem::dg);
    g("dgk", &DeltaProblem::gk, &DeltaProblem::dgk);
    g("dgv", &DeltaProblem::gv, &DeltaProblem::dgv);
    if (c.state) bo.push_back({"dh0", &DeltaProblem::dh0, DType::F32, sd, true});
    if (p.gate.A_log) bo.push_back({"dA_log", &DeltaProblem::dA_log, DType::F32, {HV}, false});
    if (p.gate.dt_bias)
      bo.push_back({"ddt_bias", &DeltaProblem::ddt_bias, DType::F32,
                    std::vector<i64>(p.gate.dt_bias.shape.begin(), p.gate.dt_bias.shape.begin() + p.gate.dt_bias.ndim),
                    false});
    using WS = std::size_t (*)(const DeltaProblem&, int);
    using FN = Status (*)(const DeltaProblem&, ThreadPool&, std::span<std::byte>);
    auto exec = [&](DeltaProblem q, std::vector<Out>& outs, bool f64, WS ws, FN fn, int threads,
                    const char* skip = nullptr) {
      std::map<std::string, Buf> ob;
      for (Out& o : outs) {
        if (skip && o.n != skip) continue;
        Buf& b = ob[o.n];
        make(b, f64 ? DType::F64 : o.t, o.dims, c.layout);
        q.*(o.m) = o.state ? sw(b.view) : b.view;
      }
      ThreadPool pool(threads);
      q.h_chunk = 16;
      std::vector<std::byte> mem(ws(q, threads), std::byte{0xff});
      Status s = fn(q, pool, mem);
      if (!s.ok()) {
        printf("%s: %s\n", c.name.c_str(), s.message().c_str());
        ++fails;
      }
      std::map<std::string, std::vector<double>> r;
      for (auto& [n, b] : ob) r[n] = values(b.view);
      return r;
    };
    auto compare = [&](const char* what, std::vector<Out>& outs, WS rw, FN rf, WS ws, FN fn, const DeltaProblem& q) {
      auto ref = exec(q, outs, true, rw, rf, 1);
      auto one = exec(q, outs, false, ws, fn, 1), two = exec(q, outs, false, ws, fn, 3);
      bool bad = false;
      std::string line;
      for (Out& o : outs) {
        auto &a = ref[o.n], &b = one[o.n], &d = two[o.n];
        double num = 0, den = 0;
        for (size_t i = 0; i < a.size(); ++i) {
          num += (a[i] - b[i]) * (a[i] - b[i]);
          den += a[i] * a[i];
          if (!(b[i] == d[i])) {
            bad = true;
            line += " BITS:" + o.n;
            break;
          }
          if (!std::isfinite(b[i])) {
            bad = true;
            line += " NAN:" + o.n + "@" + std::to_string(i);
            break;
          }
        }
        double r = den > 0 && std::sqrt(den / a.size()) > 1e-24 ? std::sqrt(num / den) : std::sqrt(num);
        double tol = o.t == DType::BF16 ? 4e-3 : o.t == DType::F16 ? 6e-4 : 1e-5;
        if (!(r < tol)) bad = true;
        char t[64];
        snprintf(t, 64, " %s=%.1e", o.n.c_str(), r);
        line += t;
        if (o.t == DType::F32) {
          auto& w = worst[std::string(what) + " " + c.name.substr(0, c.name.find('_')) + " " + o.n];
          w = std::max(w, r);
        }
        auto alone = exec(q, outs, false, ws, fn, 1, o.n.c_str())[o.n];
        for (size_t i = 0; i < b.size(); ++i)
          if (!(alone[i] == b[i])) {
            bad = true;
            line += " ALONE:" + o.n;
            break;
          }
      }
      if (bad) {
        ++fails;
        printf("FAIL %s %s:%s\n", what, c.name.c_str(), line.c_str());
      } else if (getenv("VERBOSE"))
        printf("ok   %s %s:%s\n", what, c.name.c_str(), line.c_str());
      fflush(stdout);
    };
#ifdef HAVE_FWD
    if ((mode & 1) && !stepOnly)
      compare("cf", fo, reference::delta_forward_workspace, reference::delta_forward,
              cpu::delta_chunk_forward_workspace, cpu::delta_chunk_forward, base);
#endif
#ifdef HAVE_STEP
    std::vector<Out> so(fo.begin(), fo.begin() + 2);
    if (mode & 4)
      compare("sf", so, reference::delta_forward_workspace, reference::delta_forward, cpu::delta_step_forward_workspace,
              cpu::delta_step_forward, base);
#endif
    DeltaProblem q = base;
    inp("do", q.do_, c.io, {B, T, HV, V}, nrm);
    if (c.state) {
      inp("dht", q.dht, DType::F32, sd, nrm);
      q.dht = sw(q.dht);
    }
#ifdef HAVE_BWD
    if ((mode & 2) && !stepOnly)
      compare("cb", bo, reference::delta_backward_workspace, reference::delta_backward,
              cpu::delta_chunk_backward_workspace, cpu::delta_chunk_backward, q);
    if ((mode & 2) && !stepOnly && c.state) {
      DeltaProblem z = q;
      z.do_ = {};
      Cfg keep = c;
      c.name += "_nodo";
      compare("cb", bo, reference::delta_backward_workspace, reference::delta_backward,
              cpu::delta_chunk_backward_workspace, cpu::delta_chunk_backward, z);
      c = keep;
    }
#endif
#ifdef HAVE_STEP
    if (mode & 8)
      compare("sb", bo, reference::delta_backward_workspace, reference::delta_backward,
              cpu::delta_step_backward_workspace, cpu::delta_step_backward, q);
#endif
    (void)bo;
  }
  std::map<std::string, std::pair<double, std::string>> agg;
  for (auto& [n, r] : worst) printf("%s %.1e\n", n.c_str(), r);
  printf("%d fails\n", fails);
  return fails != 0;
}
