// Cases of the delta-rule engine: a DeltaBackwardProblem over host memory for the reference and its copy for the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fla/core/threads.h"
#include "fla/engine/delta/cuda/entry.h"
#include "fla/engine/delta/problem.h"
#include "fla/engine/delta/ref.h"
#include "tests/cuda/device_array.h"

namespace fla::cuda {

// Why the engine refuses a problem; empty where it does not.
inline std::string delta_refusal(const DeltaProblem& p, const DeviceInfo& d) {
  DeltaPlan plan;
  std::string why;
  return delta_plan_forward(p, d, {}, plan, &why) ? std::string() : why;
}
inline std::string delta_backward_refusal(const DeltaBackwardProblem& p, const DeviceInfo& d) {
  DeltaPlan plan;
  std::string why;
  return delta_plan_backward(p, d, {}, plan, &why) ? std::string() : why;
}

struct DeltaCase {
  std::int64_t B = 1, T = 64, H = 1, HV = 1, K = 64, V = 64;
  DType type = DType::BF16;
  std::vector<std::int64_t> cu = {};
  enum class Gate { None, Head, Channel } gate = Gate::Head;
  DType gate_type = DType::F32;
  float gate_divisor = 1.0F;  // g = logsigmoid(normal) / divisor
  float strong_share = 0.0F;  // of the gates is `strong`
  float strong = -1000.0F;
  float zero_share = 0.0F;  // of the gates is 0
  GateActivation::Kind activation = GateActivation::Kind::None;
  bool A_log = true, dt_bias = true;
  bool normalize = true;  // in the operator; else the keys are given normalised
  double beta_sigmoid = 0.0;
  bool initial = true, state_gradient = true, state_v_first = false, states = false;
  std::int64_t h_chunk = 64;
  bool reverse = false, strided = false;
  DType state_type = DType::F32;
  // A table of slots, `columns` a sequence or one axis where 0, on a pool of `pool` states that is written in place.
  std::int64_t pool = 0, columns = 0;
  std::vector<std::int64_t> indices = {}, accepted = {};
  bool steps = false;
  Erase erase = Erase::Decayed;
  unsigned seed = 1;
};

inline float round_to(DType t, float x) {
  if (t == DType::BF16) return to_float(to_bf16(x));
  if (t == DType::F16) return to_float(to_f16(x));
  return x;
}

// A tensor on both sides.
struct Twin {
  std::vector<std::byte> host;
  std::unique_ptr<DeviceMemory> device;
  TensorView view, device_view;

  Twin() = default;
  Twin(DType t, std::vector<std::int64_t> dims, const std::vector<float>* values = nullptr) {
    view = TensorView(nullptr, t, dims);
    const auto n = static_cast<std::size_t>(view.numel());
    host.assign(n * size_of(t), std::byte{0xff});
    for (std::size_t i = 0; values != nullptr && i < n; ++i) set(i, (*values)[i]);
    finish();
  }
  void finish() {
    device = std::make_unique<DeviceMemory>(host.size());
    device->upload(host.data());
    view.data = host.data();
    device_view = view;
    device_view.data = device->data();
  }
  void set(std::size_t i, float x) {
    switch (view.dtype) {
      case DType::F32: std::memcpy(&host[4 * i], &x, 4); break;
      case DType::BF16: {
        const bf16 y = to_bf16(x);
        std::memcpy(&host[2 * i], &y, 2);
        break;
      }
      case DType::F16: {
        const f16 y = to_f16(x);
        std::memcpy(&host[2 * i], &y, 2);
        break;
      }
      case DType::F64: {
        const auto y = static_cast<double>(x);
        std::memcpy(&host[8 * i], &y, 8);
        break;
      }
      default: break;
    }
  }
  static std::vector<double> values(const std::vector<std::byte>& bytes, DType t) {
    std::vector<double> v(bytes.size() / size_of(t));
    for (std::size_t i = 0; i < v.size(); ++i) {
      switch (t) {
        case DType::F32: {
          float y;
          std::memcpy(&y, &bytes[4 * i], 4);
          v[i] = static_cast<double>(y);
          break;
        }
        case DType::BF16: {
          bf16 y;
          std::memcpy(&y, &bytes[2 * i], 2);
          v[i] = static_cast<double>(to_float(y));
          break;
        }
        case DType::F16: {
          f16 y;
          std::memcpy(&y, &bytes[2 * i], 2);
          v[i] = static_cast<double>(to_float(y));
          break;
        }
        case DType::F64: std::memcpy(&v[i], &bytes[8 * i], 8); break;
        default: break;
      }
    }
    return v;
  }
  std::vector<std::byte> device_bytes() const {
    std::vector<std::byte> b(host.size());
    device->download(b.data());
    return b;
  }
  std::vector<double> device_values() const { return values(device_bytes(), view.dtype); }
  std::vector<double> host_values() const { return values(host, view.dtype); }
};

// Root of the mean square of the difference over that of the expected values; infinite where one is not finite.
inline double relative_rms(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return size == 0.0 ? std::sqrt(error) : std::sqrt(error / size);
}

// Inputs and outputs of one case. The reference writes F32 or wider outputs of its own.
struct DeltaData {
  Twin q, k, v, beta, g, A_log, dt_bias, h0, o, ht, h, cu, indices, accepted, steps;
  Twin o_ref, ht_ref, h_ref, steps_ref;
  Twin do_, dht;
  struct Gradient {
    const char* name;
    Twin got, want;
  };
  std::vector<Gradient> gradients;  // dq, dk, dv, dbeta, dh0, dg, dA_log, ddt_bias; absent ones are empty
  SlotTable host_slots, device_slots;
  DeltaBackwardProblem host, device;

  DeltaData(const DeltaData&) = delete;
  DeltaData& operator=(const DeltaData&) = delete;
  explicit DeltaData(const DeltaCase& c) {
    std::mt19937 rng(c.seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    const std::int64_t N = c.cu.empty() ? c.B : static_cast<std::int64_t>(c.cu.size()) - 1;
    const auto fill = [&](std::size_t n, auto&& f) {
      std::vector<float> x(n);
      for (float& y : x) y = f();
      return x;
    };
    const auto count = [](std::initializer_list<std::int64_t> d) {
      std::int64_t n = 1;
      for (const std::int64_t x : d) n *= x;
      return static_cast<std::size_t>(n);
    };
    const auto unit_rows = [&](std::vector<float>& x, std::int64_t width) {
      for (std::size_t i = 0; i < x.size(); i += static_cast<std::size_t>(width)) {
        float sum = 1e-6F;
        for (std::int64_t j = 0; j < width; ++j)
          sum += x[i + static_cast<std::size_t>(j)] * x[i + static_cast<std::size_t>(j)];
        for (std::int64_t j = 0; j < width; ++j) x[i + static_cast<std::size_t>(j)] /= std::sqrt(sum);
      }
    };
    auto xq = fill(count({c.B, c.T, c.H, c.K}), [&] { return normal(rng); });
    auto xk = fill(count({c.B, c.T, c.H, c.K}), [&] { return normal(rng); });
    if (!c.normalize) unit_rows(xk, c.K);
    const auto xv = fill(count({c.B, c.T, c.HV, c.V}), [&] { return normal(rng); });
    q = make(c, {c.B, c.T, c.H, c.K}, xq);
    k = make(c, {c.B, c.T, c.H, c.K}, xk);
    v = make(c, {c.B, c.T, c.HV, c.V}, xv);
    const auto xb = fill(count({c.B, c.T, c.HV}), [&] { return c.beta_sigmoid > 0.0 ? normal(rng) : uniform(rng); });
    beta = Twin(DType::F32, {c.B, c.T, c.HV}, &xb);
    const bool raw = c.activation != GateActivation::Kind::None;
    const auto gate = [&] {
      const float x = normal(rng), u = uniform(rng);
      if (u < c.strong_share) return c.strong;
      if (raw) return x;
      if (u > 1.0F - c.zero_share) return 0.0F;
      return -std::log1p(std::exp(-x)) / c.gate_divisor;
    };
    if (c.gate == DeltaCase::Gate::Head) {
      const auto x = fill(count({c.B, c.T, c.HV}), gate);
      g = Twin(c.gate_type, {c.B, c.T, c.HV}, &x);
    } else if (c.gate == DeltaCase::Gate::Channel) {
      const auto x = fill(count({c.B, c.T, c.HV, c.K}), gate);
      g = Twin(c.gate_type, {c.B, c.T, c.HV, c.K}, &x);
    }
    if (raw && c.A_log) {
      const auto x = fill(static_cast<std::size_t>(c.HV), [&] { return normal(rng); });
      A_log = Twin(DType::F32, {c.HV}, &x);
    }
    if (raw && c.dt_bias) {
      const bool head = c.gate == DeltaCase::Gate::Head;
      const auto x = fill(static_cast<std::size_t>(head ? c.HV : c.HV * c.K), [&] { return normal(rng); });
      dt_bias = head ? Twin(DType::F32, {c.HV}, &x) : Twin(DType::F32, {c.HV, c.K}, &x);
    }
    const std::int64_t S1 = c.state_v_first ? c.V : c.K, S2 = c.state_v_first ? c.K : c.V;
    const std::int64_t states = c.pool > 0 ? c.pool : N;
    std::vector<float> initial;
    if (c.initial) {
      initial = fill(count({states, c.HV, c.K, c.V}), [&] { return round_to(c.state_type, normal(rng)); });
      h0 = Twin(c.state_type, {states, c.HV, S1, S2}, &initial);
    }
    o = Twin(c.type, {c.B, c.T, c.HV, c.V});
    ht = Twin(DType::F32, {N, c.HV, S1, S2});
    o_ref = Twin(DType::F64, {c.B, c.T, c.HV, c.V});
    ht_ref = Twin(DType::F64, {states, c.HV, S1, S2});
    if (c.pool > 0) {
      for (std::size_t i = 0; i < initial.size(); ++i) ht_ref.set(i, initial[i]);
      const auto table = [](const std::vector<std::int64_t>& x, std::vector<std::int64_t> dims) {
        Twin t;
        t.view = TensorView(nullptr, DType::I64, dims);
        t.host.resize(8 * x.size());
        std::memcpy(t.host.data(), x.data(), t.host.size());
        t.finish();
        return t;
      };
      if (!c.indices.empty()) {
        indices =
            table(c.indices, c.columns > 0 ? std::vector<std::int64_t>{N, c.columns} : std::vector<std::int64_t>{N});
      }
      if (!c.accepted.empty()) accepted = table(c.accepted, {N});
    }
    if (c.steps) {
      steps = Twin(c.state_type, {c.B, c.T, c.HV, S1, S2});
      steps_ref = Twin(DType::F64, {c.B, c.T, c.HV, S1, S2});
    }
    if (c.states) {
      std::int64_t nt = 0;
      if (c.cu.empty()) {
        nt = (c.T + c.h_chunk - 1) / c.h_chunk;
      } else {
        for (std::int64_t n = 0; n < N; ++n) {
          const auto at = static_cast<std::size_t>(n);
          nt += (c.cu[at + 1] - c.cu[at] + c.h_chunk - 1) / c.h_chunk;
        }
      }
      h = Twin(c.type, {c.B, nt, c.HV, S1, S2});
      h_ref = Twin(DType::F64, {c.B, nt, c.HV, S1, S2});
    }
    const auto xdo = fill(count({c.B, c.T, c.HV, c.V}), [&] { return normal(rng); });
    do_ = Twin(c.type, {c.B, c.T, c.HV, c.V}, &xdo);
    const auto xdht = fill(count({N, c.HV, c.K, c.V}), [&] { return normal(rng); });
    dht = Twin(DType::F32, {N, c.HV, S1, S2}, &xdht);
    const auto gradient = [&](const char* name, const Twin& of) {
      Gradient x{name, {}, {}};
      if (of.view) {
        const std::vector<std::int64_t> dims(of.view.dims().begin(), of.view.dims().end());
        x.got = Twin(of.view.dtype, dims);
        x.want = Twin(DType::F64, dims);
      }
      gradients.push_back(std::move(x));
    };
    gradient("dq", q);
    gradient("dk", k);
    gradient("dv", v);
    gradient("dbeta", beta);
    gradient("dh0", h0);
    gradient("dg", g);
    gradient("dA_log", A_log);
    gradient("ddt_bias", dt_bias);
    if (!c.cu.empty()) {
      cu.view = TensorView(nullptr, DType::I64, std::vector<std::int64_t>{N + 1});
      cu.host.resize(8 * c.cu.size());
      std::memcpy(cu.host.data(), c.cu.data(), cu.host.size());
      cu.finish();
    }
    host_slots = {indices.view, accepted.view, swapped(steps_ref.view, c.state_v_first)};
    device_slots = {indices.device_view, accepted.device_view, swapped(steps.device_view, c.state_v_first)};
    host = problem(c, N, false);
    device = problem(c, N, true);
  }

  // Rows with a gap behind each, where the case asks for strides that no vector access may use.
  static Twin make(const DeltaCase& c, std::vector<std::int64_t> dims, const std::vector<float>& values) {
    if (!c.strided) return Twin(c.type, dims, &values);
    const std::int64_t width = dims[3], wide = width + 1;
    std::vector<float> spread(values.size() / static_cast<std::size_t>(width) * static_cast<std::size_t>(wide), NAN);
    for (std::size_t i = 0; i < values.size(); ++i) {
      spread[i / static_cast<std::size_t>(width) * static_cast<std::size_t>(wide) +
             i % static_cast<std::size_t>(width)] = values[i];
    }
    dims[3] = wide;
    Twin t(c.type, dims, &spread);
    t.view.shape[3] = t.device_view.shape[3] = width;
    return t;
  }

  static TensorView swapped(TensorView t, bool swap) {
    if (swap && t) {
      const auto i = static_cast<std::size_t>(t.ndim);
      std::swap(t.shape[i - 1], t.shape[i - 2]);
      std::swap(t.stride[i - 1], t.stride[i - 2]);
    }
    return t;
  }

  DeltaBackwardProblem problem(const DeltaCase& c, std::int64_t N, bool on_device) const {
    const auto of = [&](const Twin& t) { return on_device ? t.device_view : t.view; };
    DeltaBackwardProblem p;
    p.B = c.B;
    p.T = c.T;
    p.H = c.H;
    p.HV = c.HV;
    p.K = c.K;
    p.V = c.V;
    p.N = N;
    p.cu_seqlens = of(cu);
    p.reverse = c.reverse;
    p.scale = 1.0 / std::sqrt(static_cast<double>(c.K));
    p.erase = c.erase;
    p.q = of(q);
    p.k = of(k);
    p.v = of(v);
    p.beta = of(beta);
    (c.gate == DeltaCase::Gate::Channel ? p.gk : p.g) = of(g);
    p.gate.kind = c.activation;
    p.gate.lower_bound = -5.0;
    p.gate.A_log = of(A_log);
    p.gate.dt_bias = of(dt_bias);
    p.normalize_q = p.normalize_k = c.normalize;
    p.beta_sigmoid = c.beta_sigmoid;
    p.h0 = swapped(of(h0), c.state_v_first);
    p.o = of(on_device ? o : o_ref);
    p.ht = swapped(of(!on_device ? ht_ref : c.pool > 0 ? h0 : ht), c.state_v_first);
    p.pool = on_device ? &device_slots : &host_slots;
    p.h = swapped(of(on_device ? h : h_ref), c.state_v_first);
    p.h_chunk = c.h_chunk;
    p.do_ = of(do_);
    if (c.state_gradient) p.dht = swapped(of(dht), c.state_v_first);
    const auto grad = [&](std::size_t i) { return of(on_device ? gradients[i].got : gradients[i].want); };
    p.dq = grad(0);
    p.dk = grad(1);
    p.dv = grad(2);
    p.dbeta = grad(3);
    p.dh0 = swapped(grad(4), c.state_v_first);
    (c.gate == DeltaCase::Gate::Channel ? p.dgk : p.dg) = grad(5);
    p.dA_log = grad(6);
    p.ddt_bias = grad(7);
    return p;
  }
};

inline Status run_delta_reference(const DeltaProblem& p) {
  ThreadPool pool(1);
  std::vector<std::byte> ws(reference::delta_forward_workspace(p, 1));
  return reference::delta_forward(p, pool, ws);
}

inline Status run_delta_backward_reference(const DeltaBackwardProblem& p) {
  ThreadPool pool(1);
  std::vector<std::byte> ws(reference::delta_backward_workspace(p, 1));
  return reference::delta_backward(p, pool, ws);
}

}  // namespace fla::cuda
