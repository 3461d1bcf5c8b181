// The CPU kernels of linear_attn. The recurrence is the diagonal-decay engine's; here is the normalisation, README.md
// (3) to (7): z scanned in fp32 per sequence and head, parallel over both.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fla/ops/linear_attn/linear_attn_cpu.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

#include "fla/kernels/cpu/io-inl.h"

#ifndef FLA_OPS_LINEAR_ATTN_LINEAR_ATTN_CPU_ONCE_
#define FLA_OPS_LINEAR_ATTN_LINEAR_ATTN_CPU_ONCE_

#include "fla/engine/diag/cpu/internal.h"
#include "fla/engine/diag/engine.h"
#include "fla/kernels/cpu/arena.h"
#include "fla/kernels/cpu/rows.h"
#include "fla/ops/linear_attn/linear_attn_problem.h"

namespace fla::cpu {

// Rows of one worker.
struct NormaliseScratch {
  float *z, *q, *k, *x;  // [K]
  float *y, *up;         // [V]
  void carve(Arena& m, const DiagProblem& p) {
    for (float** f : {&z, &q, &k, &x}) *f = m.floats(pad_up(p.K));
    for (float** f : {&y, &up}) *f = m.floats(pad_up(p.V));
  }
};

// What the normalised form reads and writes beside the recurrence. Intermediates are F32 views of the workspace, or the
// outputs themselves where those are F32.
struct Normalise {
  DiagProblem p;      // as the caller sees it
  TensorView z0, zt;  // [N, 1, H, K]
  TensorView dzt, dz0;
  TensorView y;                          // [B, T, H, V]: output of the recurrence, in the backward then its gradient
  TensorView dd;                         // [B, T, H]: gradient of the denominator
  TensorView dq, dk;                     // [B, T, H, K]: gradients that the recurrence gives
  TensorView do_, wanted_dq, wanted_dk;  // of the caller
  bool gradient_of_d = false;
  NormaliseScratch* scratch = nullptr;
};

}  // namespace fla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

namespace {

using F = hn::ScalableTag<float>;

HWY_INLINE std::int64_t lanes_of(F d) { return static_cast<std::int64_t>(hn::Lanes(d)); }

HWY_INLINE void load_padded(const Rows& x, std::int64_t t, std::int64_t n, float* to) {
  load_row(x.at(t, 0), x.dtype, x.last, n, to);
  for (std::int64_t i = n; i < pad_up(n); ++i) to[i] = 0.0F;
}

HWY_INLINE float dot(const float* a, const float* b, std::int64_t n) {
  const F d;
  auto sum = hn::Zero(d);
  for (std::int64_t i = 0; i < n; i += lanes_of(d)) sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// to += factor * x
HWY_INLINE void add_scaled(const float* x, float factor, std::int64_t n, float* to) {
  const F d;
  for (std::int64_t i = 0; i < n; i += lanes_of(d))
    hn::Store(hn::MulAdd(hn::Set(d, factor), hn::Load(d, x + i), hn::Load(d, to + i)), d, to + i);
}

HWY_INLINE void add(const float* x, std::int64_t n, float* to) {
  const F d;
  for (std::int64_t i = 0; i < n; i += lanes_of(d))
    hn::Store(hn::Add(hn::Load(d, x + i), hn::Load(d, to + i)), d, to + i);
}

HWY_INLINE void divide(const float* x, float by, std::int64_t n, float* to) {
  const F d;
  for (std::int64_t i = 0; i < n; i += lanes_of(d)) hn::Store(hn::Div(hn::Load(d, x + i), hn::Set(d, by)), d, to + i);
}

// One sequence and head, tokens in the order of the recurrence.
struct Head {
  const Normalise& m;
  const DiagProblem& p;
  std::int64_t n, h, Kp, Vp;
  Sequence s;
  NormaliseScratch w;

  Head(const Normalise& all, std::int64_t task, int worker)
      : m(all),
        p(all.p),
        n(task / p.H),
        h(task % p.H),
        Kp(pad_up(p.K)),
        Vp(pad_up(p.V)),
        s(p.sequence(n)),
        w(all.scratch[worker]) {}

  Rows rows(const TensorView& x) const { return token_rows(x, p, s, h); }
  float* dd(std::int64_t t) const { return m.dd.as<float>() + (s.row * p.H + h) * p.T + s.begin + t; }

  void load_z(const TensorView& z) const {
    std::fill_n(w.z, Kp, 0.0F);
    if (z) load_row(z.at(n, 0, h), z.dtype, z.stride[3], p.K, w.z);
  }
  void store_z(const TensorView& z) const {
    if (z) store_row(w.z, z.at(n, 0, h), z.dtype, z.stride[3], p.K);
  }
  // z_t in w.z, and d_t; (3), (4)
  float denominator(const Rows& q, const Rows& k, std::int64_t t) const {
    load_padded(k, t, p.K, w.k);
    add(w.k, Kp, w.z);
    load_padded(q, t, p.K, w.q);
    return static_cast<float>(p.scale) * dot(w.q, w.z, Kp) + static_cast<float>(kLinearAttnEpsilon);
  }

  void forward() const {
    const Rows q = rows(p.q), k = rows(p.k), y = rows(m.y), o = rows(p.o);
    load_z(m.z0);
    for (std::int64_t t = 0; t < s.length; ++t) {
      if (!o) {
        load_padded(k, t, p.K, w.k);
        add(w.k, Kp, w.z);
        continue;
      }
      const float d = denominator(q, k, t);
      load_padded(y, t, p.V, w.y);
      divide(w.y, d, Vp, w.y);  // (5)
      store_row(w.y, o.at(t, 0), o.dtype, o.last, p.V);
    }
    store_z(m.zt);
  }

  // (6): y becomes dy.
  void output_gradients() const {
    const Rows q = rows(p.q), k = rows(p.k), y = rows(m.y), up = rows(m.do_);
    load_z(m.z0);
    for (std::int64_t t = 0; t < s.length; ++t) {
      const float d = denominator(q, k, t);
      load_padded(up, t, p.V, w.up);
      if (m.gradient_of_d) {
        load_padded(y, t, p.V, w.y);
        *dd(t) = -dot(w.up, w.y, Vp) / d / d;
      }
      divide(w.up, d, Vp, w.up);
      store_row(w.up, y.at(t, 0), y.dtype, y.last, p.V);
    }
  }

  // (7)
  void denominator_gradients() const {
    const Rows q = rows(p.q), k = rows(p.k);
    const float scale = static_cast<float>(p.scale);
    if (m.wanted_dq) {
      const Rows from = rows(m.dq), to = rows(m.wanted_dq);
      load_z(m.z0);
      for (std::int64_t t = 0; t < s.length; ++t) {
        load_padded(k, t, p.K, w.k);
        add(w.k, Kp, w.z);
        load_padded(from, t, p.K, w.x);
        if (m.do_) add_scaled(w.z, *dd(t) * scale, Kp, w.x);
        store_row(w.x, to.at(t, 0), to.dtype, to.last, p.K);
      }
    }
    if (!m.wanted_dk && !m.dz0) return;
    const Rows from = rows(m.dk), to = rows(m.wanted_dk);
    load_z(m.dzt);
    for (std::int64_t t = s.length - 1; t >= 0; --t) {
      if (m.do_) {
        load_padded(q, t, p.K, w.q);
        add_scaled(w.q, *dd(t) * scale, Kp, w.z);
      }
      if (!to) continue;
      load_padded(from, t, p.K, w.x);
      add(w.z, Kp, w.x);
      store_row(w.x, to.at(t, 0), to.dtype, to.last, p.K);
    }
    store_z(m.dz0);
  }
};

void normalise_forward(const Normalise& m, ThreadPool& pool) {
  pool.run(m.p.N * m.p.H, [&](std::int64_t task, int worker) { Head(m, task, worker).forward(); });
}

void normalise_output_gradients(const Normalise& m, ThreadPool& pool) {
  pool.run(m.p.N * m.p.H, [&](std::int64_t task, int worker) { Head(m, task, worker).output_gradients(); });
}

void normalise_denominator_gradients(const Normalise& m, ThreadPool& pool) {
  pool.run(m.p.N * m.p.H, [&](std::int64_t task, int worker) { Head(m, task, worker).denominator_gradients(); });
}

}  // namespace
}  // namespace fla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fla {
namespace cpu {
namespace {

HWY_EXPORT(normalise_forward);
HWY_EXPORT(normalise_output_gradients);
HWY_EXPORT(normalise_denominator_gradients);

// The recurrence in one of its two forms.
struct Engine {
  Form form;

  std::size_t forward_workspace(const DiagProblem& p, int threads) const {
    return form == Form::Step ? diag_step_forward_workspace(p, threads)
                              : diag_chunk_forward_workspace(p, p.chunk, threads);
  }
  std::size_t backward_workspace(const DiagBackwardProblem& p, int threads) const {
    return form == Form::Step ? diag_step_backward_workspace(p, threads)
                              : diag_chunk_backward_workspace(p, p.chunk, threads);
  }
  Status forward(const DiagProblem& p, ThreadPool& pool, std::span<std::byte> ws) const {
    return form == Form::Step ? diag_step_forward(p, pool, ws) : diag_chunk_forward(p, p.chunk, pool, ws);
  }
  Status backward(const DiagBackwardProblem& p, ThreadPool& pool, std::span<std::byte> ws) const {
    return form == Form::Step ? diag_step_backward(p, pool, ws) : diag_chunk_backward(p, p.chunk, pool, ws);
  }
};

// The normalised call cut into what the recurrence does and what is done here. Without memory it measures.
struct Normalised : Normalise {
  DiagProblem forward;  // what the engine is asked for
  DiagBackwardProblem backward;
  std::span<std::byte> engine_memory;
  std::size_t bytes = 0;

  Normalised(const LinearAttnArgs& a, Engine e, int threads, std::byte* base) : memory_(base) {
    p = to_problem(a);
    z0 = a.initial_z;
    zt = a.final_z;
    forward = p;
    if (a.o) forward.o = y = own_or(p.o);
    finish(base, threads, e.forward_workspace(forward, threads));
  }

  Normalised(const LinearAttnBackwardArgs& a, Engine e, int threads, std::byte* base)
      : backward(to_problem(a)), memory_(base) {
    p = forward = backward;
    do_ = a.do_;
    wanted_dq = a.dq;
    wanted_dk = a.dk;
    z0 = a.initial_z;
    dzt = a.dzt;
    dz0 = a.dz0;
    forward.ht = {};
    std::size_t need = 0;
    if (a.do_) {
      forward.o = backward.do_ = y = floats({p.B, p.T, p.H, p.V});
      gradient_of_d = a.dq || a.dk || a.dz0;
      if (gradient_of_d) {
        dd = floats({p.B, p.H, p.T});
        need = e.forward_workspace(forward, threads);
      }
    }
    if (a.dq) backward.dq = dq = own_or(a.dq);
    if (a.dk) backward.dk = dk = own_or(a.dk);
    finish(base, threads, std::max(need, e.backward_workspace(backward, threads)));
  }

 private:
  TensorView floats(std::initializer_list<std::int64_t> dims) {
    std::int64_t n = 1;
    for (const std::int64_t d : dims) n *= d;
    return {memory_.floats(n), DType::F32, std::span(dims.begin(), dims.size())};
  }
  // The sums of (5) and (7) are fp32 until their one rounding: a 16-bit output cannot hold them in between.
  TensorView own_or(const TensorView& out) {
    return out.dtype == DType::F32 ? out : floats({out.dim(0), out.dim(1), out.dim(2), out.dim(3)});
  }
  void finish(std::byte* base, int threads, std::size_t engine) {
    scratch = memory_.take<NormaliseScratch>(threads);
    for (int i = 0; i < threads; ++i) {
      NormaliseScratch w;
      w.carve(memory_, p);
      if (base != nullptr) scratch[i] = w;
    }
    std::byte* rest = memory_.take<std::byte>(static_cast<std::int64_t>(engine));
    engine_memory = {rest, rest == nullptr ? 0 : engine};
    bytes = memory_.bytes();
  }

  Arena memory_;
};

Status normalised_forward(const LinearAttnArgs& a, Engine e, ThreadPool& pool, std::span<std::byte> ws) {
  const Normalised m(a, e, pool.size(), ws.data());
  if (m.forward.o || m.forward.ht)
    if (Status s = e.forward(m.forward, pool, m.engine_memory); !s) return s;
  if (a.o || a.final_z) HWY_DYNAMIC_DISPATCH(normalise_forward)(m, pool);
  return {};
}

Status normalised_backward(const LinearAttnBackwardArgs& a, Engine e, ThreadPool& pool, std::span<std::byte> ws) {
  const Normalised m(a, e, pool.size(), ws.data());
  if (m.gradient_of_d)
    if (Status s = e.forward(m.forward, pool, m.engine_memory); !s) return s;
  if (a.do_) HWY_DYNAMIC_DISPATCH(normalise_output_gradients)(m, pool);
  if (a.dq || a.dk || a.dv || a.dh0)
    if (Status s = e.backward(m.backward, pool, m.engine_memory); !s) return s;
  if (a.dq || a.dk || a.dz0) HWY_DYNAMIC_DISPATCH(normalise_denominator_gradients)(m, pool);
  return {};
}

void add_kernels(Registry& r, FunctionId<LinearAttnArgs> f, FunctionId<LinearAttnBackwardArgs> b, Form form,
                 bool normalize) {
  const Engine e{form};
  const bool step = form == Form::Step;
  r.add(Kernel<LinearAttnArgs>{
      .function = f,
      .backend = "cpu",
      .name = step ? "linear.step.forward" : "linear.chunk.forward",
      .verify = [](const LinearAttnArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace =
          [e, normalize](const LinearAttnArgs& a, const CallInfo& c) {
            if (a.normalize.value_or(normalize)) return Normalised(a, e, c.threads, nullptr).bytes;
            return e.forward_workspace(to_problem(a), c.threads);
          },
      .launch =
          [e, normalize](const LinearAttnArgs& a, const CallInfo&, const LaunchInfo& l) {
            if (a.normalize.value_or(normalize)) return normalised_forward(a, e, *l.pool, l.workspace);
            return e.forward(to_problem(a), *l.pool, l.workspace);
          }});
  r.add(Kernel<LinearAttnBackwardArgs>{
      .function = b,
      .backend = "cpu",
      .name = step ? "linear.step.backward" : "linear.chunk.backward",
      .verify = [](const LinearAttnBackwardArgs& a, const CallInfo& c) { return verify_cpu(c, a.q.dtype); },
      .workspace =
          [e, normalize](const LinearAttnBackwardArgs& a, const CallInfo& c) {
            if (a.normalize.value_or(normalize)) return Normalised(a, e, c.threads, nullptr).bytes;
            return e.backward_workspace(to_problem(a), c.threads);
          },
      .launch =
          [e, normalize](const LinearAttnBackwardArgs& a, const CallInfo&, const LaunchInfo& l) {
            if (a.normalize.value_or(normalize)) return normalised_backward(a, e, *l.pool, l.workspace);
            return e.backward(to_problem(a), *l.pool, l.workspace);
          }});
}

}  // namespace
}  // namespace cpu

void register_linear_attn_cpu(Registry& r) {
  r.add_backend("linear_attn", cpu_backend());
  cpu::add_kernels(r, kChunkLinearAttn, kChunkLinearAttnBackward, Form::Chunk, true);
  cpu::add_kernels(r, kFusedChunkLinearAttn, kFusedChunkLinearAttnBackward, Form::Chunk, true);
  cpu::add_kernels(r, kFusedRecurrentLinearAttn, kFusedRecurrentLinearAttnBackward, Form::Step, false);
}

}  // namespace fla
#endif
