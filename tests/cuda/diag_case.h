// A problem of the diagonal-decay engine with random contents, on the host for the double reference and on the device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fla/core/threads.h"
#include "fla/engine/common/ref_access.h"
#include "fla/engine/diag/cuda/entry.h"
#include "fla/engine/diag/ref.h"
#include "fla/kernels/cuda/launch.h"
#include "tests/cuda/device_array.h"

namespace fla::cuda {

// Why the engine refuses a problem; empty where it does not.
inline std::string diag_refusal(const DiagProblem& p, const DeviceInfo& d) {
  DiagPlan plan;
  std::string why;
  return diag_plan_forward(p, d, {}, plan, &why) ? std::string() : why;
}
inline std::string diag_backward_refusal(const DiagBackwardProblem& p, const DeviceInfo& d) {
  DiagBackwardPlan plan;
  std::string why;
  return diag_plan_backward(p, d, {}, plan, &why) ? std::string() : why;
}

// Both copies of a tensor. The host one of an output is F64.
struct TestTensor {
  TensorView host, device;
  std::vector<std::byte> bytes;
  std::unique_ptr<DeviceMemory> memory;
};

// order: axes from the slowest to the fastest in memory; pad: elements left free at the end of the fastest axis.
inline TensorView laid_out(DType t, const std::vector<std::int64_t>& shape, const std::vector<int>& order, int pad) {
  TensorView v;
  v.dtype = t;
  v.ndim = static_cast<int>(shape.size());
  std::int64_t step = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto axis = static_cast<std::size_t>(order[i]);
    v.shape[axis] = shape[axis];
    v.stride[axis] = step;
    step *= shape[axis] + (i + 1 == order.size() ? pad : 0);
  }
  return v;
}

struct DiagCase {
  std::int64_t B = 1, T = 70, H = 2, K = 64, V = 64;
  DType type = DType::BF16, gate_type = DType::F32, state_type = DType::F32;
  enum class Gate : std::uint8_t { None, Head, Gamma, Retention, Lightning, Channel, Value } gate = Gate::None;
  double least_gate = -0.2;  // gates are uniform between this and 0
  bool extreme = false;      // some gates are 0, some `strongest`
  double strongest = -1000;
  bool reverse = false, h0 = true, ht = true, inplace = false, value_first = false;
  std::vector<std::int64_t> lengths;  // of packed sequences, T is their sum
  bool heads_first = false, odd_rows = false, columns_apart = false;
  bool backward = false, upstream = true;  // gradients instead of outputs; do given
  unsigned seed = 1;
};

class DiagRun {
 public:
  explicit DiagRun(const DiagCase& c) : c_(c), random_(c.seed) {
    host = problem();
    device = host;
    const std::vector<std::int64_t> qk = {c.B, c.T, c.H, c.K}, vo = {c.B, c.T, c.H, c.V},
                                    state = {host.N, c.H, c.K, c.V};
    const double unit = 1.0 / std::sqrt(static_cast<double>(c.K));
    input(&DiagProblem::q, c.type, qk, [&] { return normal(); });
    input(&DiagProblem::k, c.type, qk, [&] { return normal() * unit * 2; });
    input(&DiagProblem::v, c.type, vo, [&] { return normal(); });
    const auto gate = [&] { return this->gate(); };
    using Gate = DiagCase::Gate;
    if (c.gate == Gate::Head) input(&DiagProblem::g, c.gate_type, {c.B, c.T, c.H}, gate);
    if (c.gate == Gate::Channel) input(&DiagProblem::gk, c.gate_type, qk, gate);
    if (c.gate == Gate::Value) input(&DiagProblem::gv, c.gate_type, vo, gate);
    if (c.gate == Gate::Gamma) {
      TestTensor& t = make(laid_out(DType::F32, {c.H}, {0}, 0));
      fill(t, gate);
      host.head = device.head = {.kind = HeadDecay::Kind::Tensor};
      host.head.gamma = t.host;
      device.head.gamma = t.device;
    }
    if (c.gate == Gate::Retention) host.head.kind = device.head.kind = HeadDecay::Kind::Retention;
    if (c.gate == Gate::Lightning) {
      host.head.kind = device.head.kind = HeadDecay::Kind::Lightning;
      host.head.slope = device.head.slope = -0.3;
    }
    if (c.h0)
      input(
          &DiagProblem::h0, c.state_type, state, [&] { return normal(); }, true);
    if (!c.lengths.empty()) {
      TestTensor& t = make(laid_out(DType::I32, {host.N + 1}, {0}, 0));
      std::int32_t at = 0;
      for (std::int64_t n = 0; n <= host.N; ++n) {
        reinterpret_cast<std::int32_t*>(t.bytes.data())[n] = at;
        if (n < host.N) at += static_cast<std::int32_t>(c.lengths[static_cast<std::size_t>(n)]);
      }
      upload(t);
      host.cu_seqlens = t.host;
      device.cu_seqlens = t.device;
    }
    if (c.backward) {
      if (c.upstream) input(&DiagBackwardProblem::do_, c.type, vo, [&] { return normal(); });
      if (c.ht)
        input(
            &DiagBackwardProblem::dht, c.state_type, state, [&] { return normal(); }, true);
      output(&DiagBackwardProblem::dq, c.type, qk, false);
      output(&DiagBackwardProblem::dk, c.type, qk, false);
      output(&DiagBackwardProblem::dv, c.type, vo, false);
      if (c.gate == Gate::Head) output(&DiagBackwardProblem::dg, DType::F32, {c.B, c.T, c.H}, false);
      if (c.gate == Gate::Channel) output(&DiagBackwardProblem::dgk, DType::F32, qk, false);
      if (c.h0) output(&DiagBackwardProblem::dh0, c.state_type, state, true);
      return;
    }
    output(&DiagProblem::o, c.type, vo, false);
    if (c.ht) output(&DiagProblem::ht, c.state_type, state, true);
  }

  // The largest relative RMS difference of the outputs; -1 for an error, whose text follows.
  double forward(const DeviceInfo& info, std::string& error) {
    return forward(diag_forward_plan(device, info), info, error);
  }
  double forward(const DiagPlan& plan, const DeviceInfo& info, std::string& error) {
    const Status s = run_both(plan, info);
    if (!s) {
      error = s.message();
      return -1;
    }
    return worst();
  }
  // Each gradient's relative RMS difference, by name.
  std::vector<std::pair<std::string, double>> backward(const DeviceInfo& info, std::string& error) {
    return backward(diag_backward_plan(device, info), info, error);
  }
  std::vector<std::pair<std::string, double>> backward(const DiagBackwardPlan& plan, const DeviceInfo& info,
                                                       std::string& error) {
    ThreadPool pool(1);
    std::vector<std::byte> scratch(reference::diag_backward_workspace(host, 1));
    Status s = reference::diag_backward(host, pool, scratch);
    const Status ran = s.ok() ? run_backward(plan, info) : s;
    const Status waited = ran.ok() ? wait_for_device() : ran;
    std::vector<std::pair<std::string, double>> all;
    if (!waited) {
      error = waited.message();
      return all;
    }
    for (auto& [expected, t] : outputs_) {
      const char* name = "?";
      for (const auto& [member, text] : {std::pair{&DiagBackwardProblem::dq, "dq"},
                                         {&DiagBackwardProblem::dk, "dk"},
                                         {&DiagBackwardProblem::dv, "dv"},
                                         {&DiagBackwardProblem::dg, "dg"},
                                         {&DiagBackwardProblem::dgk, "dgk"},
                                         {&DiagBackwardProblem::dh0, "dh0"}}) {
        if ((host.*member).data == expected.data) name = text;
      }
      all.emplace_back(name, difference(expected, *t));
    }
    return all;
  }
  Status run_backward(const DiagBackwardPlan& plan, const DeviceInfo& info) {
    if (const std::string why = diag_backward_refusal(device, info); !why.empty()) return {Code::Unsupported, why};
    const std::size_t bytes = diag_backward_workspace(device, plan);
    workspace_ = std::make_unique<DeviceMemory>(bytes + 1);
    return diag_backward(device, plan, {}, {static_cast<std::byte*>(workspace_->data()), bytes});
  }
  Status run_both(const DiagPlan& plan, const DeviceInfo& info) {
    ThreadPool pool(1);
    std::vector<std::byte> scratch(reference::diag_forward_workspace(host, 1));
    if (Status s = reference::diag_forward(host, pool, scratch); !s) return s;
    if (Status s = run_forward(plan, info); !s) return s;
    return wait_for_device();
  }
  Status run_forward(const DeviceInfo& info) { return run_forward(diag_forward_plan(device, info), info); }
  Status run_forward(const DiagPlan& plan, const DeviceInfo& info) {
    if (const std::string why = diag_refusal(device, info); !why.empty()) return {Code::Unsupported, why};
    const std::size_t bytes = diag_forward_workspace(device, plan);
    workspace_ = std::make_unique<DeviceMemory>(bytes + 1);
    return diag_forward(device, plan, {}, {static_cast<std::byte*>(workspace_->data()), bytes});
  }
  // The device's output tensor as doubles, in the order of its shape.
  std::vector<double> output_values(const TensorView& device_view) {
    for (TestTensor& t : tensors_) {
      if (t.device.data == device_view.data) return read(t);
    }
    return {};
  }
  double worst() {
    double most = 0;
    for (auto& [expected, t] : outputs_) {
      const double r = difference(expected, *t);
      if (!(r <= most)) most = r;  // NaN counts as worst
      if (std::isnan(r)) return r;
    }
    return most;
  }
  // Overwrites the device's inputs at tokens >= t of every dense sequence.
  void disturb_after(std::int64_t t) {
    for (TestTensor* x : token_inputs_) {
      const TensorView& v = x->host;
      for (std::int64_t b = 0; b < v.dim(0); ++b)
        for (std::int64_t i = t; i < v.dim(1); ++i)
          for (std::int64_t h = 0; h < v.dim(2); ++h)
            for (std::int64_t j = 0; j < (v.ndim > 3 ? v.dim(3) : 1); ++j)
              reference::store(v, reference::load(v, b, i, h, j) * 0.5, b, i, h, j);
      upload(*x);
    }
  }

  // Sets a value of the first sequence's first head at a token: of q, k, v, then gates. Returns what was there.
  std::size_t inputs() const { return token_inputs_.size(); }
  double plant(std::size_t which, std::int64_t token, std::int64_t channel, double value) {
    TestTensor& t = *token_inputs_[which];
    if (t.host.ndim < 4) channel = 0;
    const double before = reference::load(t.host, 0, token, 0, channel);
    reference::store(t.host, value, 0, token, 0, channel);
    upload(t);
    return before;
  }
  // The memory of every output, and of the states, which may be one.
  std::vector<std::pair<const DeviceMemory*, std::size_t>> memory() const {
    std::vector<std::pair<const DeviceMemory*, std::size_t>> all;
    for (const auto& [expected, t] : outputs_) all.emplace_back(t->memory.get(), t->bytes.size() + 1);
    return all;
  }

  DiagBackwardProblem host, device;

 private:
  double normal() { return std::normal_distribution<double>()(random_); }
  double gate() {
    const double x = std::uniform_real_distribution<double>(c_.least_gate, 0.0)(random_);
    if (!c_.extreme) return x;
    const unsigned pick = random_() % 8;
    return pick == 0 ? c_.strongest : pick == 1 ? 0.0 : x;
  }
  DiagBackwardProblem problem() const {
    DiagBackwardProblem p;
    p.B = c_.B;
    p.T = c_.T;
    p.H = c_.H;
    p.K = c_.K;
    p.V = c_.V;
    p.N = c_.lengths.empty() ? c_.B : static_cast<std::int64_t>(c_.lengths.size());
    p.reverse = c_.reverse;
    p.scale = 1.0 / std::sqrt(static_cast<double>(c_.K));
    return p;
  }
  std::vector<int> order(std::size_t axes, bool state) const {
    if (axes == 4 && state && c_.value_first) return {0, 1, 3, 2};
    if (axes == 4 && !state && c_.columns_apart) return {0, 2, 3, 1};
    if (axes == 4 && !state && c_.heads_first) return {0, 2, 1, 3};
    std::vector<int> all(axes);
    for (std::size_t i = 0; i < axes; ++i) all[i] = static_cast<int>(i);
    return all;
  }
  TestTensor& make(TensorView v) {
    tensors_.emplace_back();
    TestTensor& t = tensors_.back();
    std::int64_t last = 0;
    for (int i = 0; i < v.ndim; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (v.shape[at] == 0) last = -1;
      if (last >= 0) last += (v.shape[at] - 1) * v.stride[at];
    }
    t.bytes.resize(static_cast<std::size_t>(last + 1) * size_of(v.dtype));
    t.memory = std::make_unique<DeviceMemory>(t.bytes.size() + 1);
    t.host = t.device = v;
    t.host.data = t.bytes.data();
    t.device.data = t.memory->data();
    return t;
  }
  void upload(const TestTensor& t) {
    std::vector<std::byte> all(t.bytes.size() + 1);
    if (!t.bytes.empty()) std::memcpy(all.data(), t.bytes.data(), t.bytes.size());
    t.memory->upload(all.data());
  }
  template <typename F>
  void each(const TensorView& v, F&& f) {
    std::int64_t n[4] = {1, 1, 1, 1};
    for (int i = 0; i < v.ndim; ++i) n[i] = v.dim(i);
    for (std::int64_t a = 0; a < n[0]; ++a)
      for (std::int64_t b = 0; b < n[1]; ++b)
        for (std::int64_t c = 0; c < n[2]; ++c)
          for (std::int64_t d = 0; d < n[3]; ++d) f(a, b, c, d);
  }
  template <typename F>
  void fill(TestTensor& t, F&& value) {
    each(t.host, [&](auto... i) { reference::store(t.host, value(), i...); });
    upload(t);
  }
  template <typename F>
  void input(TensorView DiagBackwardProblem::*member, DType type, const std::vector<std::int64_t>& shape, F&& value,
             bool state = false) {
    TestTensor& t = make(laid_out(type, shape, order(shape.size(), state), c_.odd_rows && !state ? 3 : 0));
    fill(t, value);
    host.*member = t.host;
    device.*member = t.device;
    if (!state) token_inputs_.push_back(&t);
  }
  void output(TensorView DiagBackwardProblem::*member, DType type, const std::vector<std::int64_t>& shape, bool state) {
    TestTensor& exact = make(laid_out(DType::F64, shape, order(shape.size(), false), 0));
    host.*member = exact.host;
    if (state && c_.inplace) {
      device.*member = device.h0;
      for (TestTensor& t : tensors_) {
        if (t.device.data == device.h0.data) outputs_.emplace_back(exact.host, &t);
      }
      return;
    }
    TestTensor& t = make(laid_out(type, shape, order(shape.size(), state), c_.odd_rows && !state ? 3 : 0));
    device.*member = t.device;
    outputs_.emplace_back(exact.host, &t);
  }
  double difference(const TensorView& expected, TestTensor& t) {
    const std::vector<double> got = read(t), want = values(expected);
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    return std::sqrt(difference / std::max(size, 1e-60));
  }
  std::vector<double> values(const TensorView& v) {
    std::vector<double> all;
    each(v, [&](auto... i) { all.push_back(reference::load(v, i...)); });
    return all;
  }
  std::vector<double> read(TestTensor& t) {
    std::vector<std::byte> all(t.bytes.size() + 1);
    t.memory->download(all.data());
    TensorView v = t.host;
    v.data = all.data();
    return values(v);
  }

  DiagCase c_;
  std::mt19937 random_;
  std::deque<TestTensor> tensors_;
  std::vector<TestTensor*> token_inputs_;
  std::vector<std::pair<TensorView, TestTensor*>> outputs_;
  std::unique_ptr<DeviceMemory> workspace_;
};

}  // namespace fla::cuda
