#include <cstdint>
#include <stdexcept>
#include <vector>

#include "fla/fla.hpp"

// A layer's states: one [HV, K, V] per slot. What belongs to which sequence is the server's business.
struct Layer {
  std::int64_t slots, H, HV, K, V;
  std::vector<float> memory = std::vector<float>(static_cast<std::size_t>(slots * HV * K * V));
  fla::TensorView pool() { return {memory.data(), {slots, HV, K, V}}; }
  fla::TensorView slot(std::int64_t i) { return {memory.data() + i * HV * K * V, {1, HV, K, V}}; }
};

// T tokens of each of B sequences: q, k [B, T, H, K]; v, o [B, T, HV, V]; g, beta [B, T, HV].
struct Tokens {
  std::int64_t B, T;
  float *q, *k, *v, *g, *beta, *o;
};

template <typename Args>
Args arguments(const Layer& m, const Tokens& x) {
  Args a;
  a.q = {x.q, {x.B, x.T, m.H, m.K}}, a.k = {x.k, {x.B, x.T, m.H, m.K}};
  a.v = {x.v, {x.B, x.T, m.HV, m.V}}, a.o = {x.o, {x.B, x.T, m.HV, m.V}};
  a.g = {x.g, {x.B, x.T, m.HV}}, a.beta = {x.beta, {x.B, x.T, m.HV}};
  return a;
}

void check(const fla::Status& s) {
  if (!s) throw std::runtime_error(s.message());
}

// A prompt: its state goes straight into a slot.
void prefill(const fla::Context& ctx, Layer& m, const Tokens& x, std::int64_t slot) {
  auto a = arguments<fla::GatedDeltaRuleArgs>(m, x);
  a.final_state = m.slot(slot);
  check(fla::chunk_gdn(ctx, a));
}

// One token of each sequence. slots [B]; -1 fills a batch of fixed size up.
void decode(const fla::Context& ctx, Layer& m, const Tokens& x, const std::int64_t* slots) {
  auto a = arguments<fla::GdnStepArgs>(m, x);
  a.state = m.pool();
  a.state_indices = {slots, {x.B}};
  check(fla::gdn_step(ctx, a));
}

// T draft tokens of each sequence. slots [B, S], S >= T: the state after draft token i goes to column i. The first
// token starts from column accepted - 1, the last one that the model agreed with in the round before.
void verify(const fla::Context& ctx, Layer& m, const Tokens& x, const std::int64_t* slots, std::int64_t S,
            const std::int64_t* accepted) {
  auto a = arguments<fla::GdnStepArgs>(m, x);
  a.state = m.pool();
  a.state_indices = {slots, {x.B, S}};
  a.num_accepted_tokens = {accepted, {x.B}};
  check(fla::gdn_step(ctx, a));
}
