// Outputs may not share memory with other arguments; a final state may be exactly its initial state.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "fla/fla.hpp"

namespace fla {
namespace {

struct Memory {
  std::vector<float> q, k, v, g, o, state;
  GlaArgs args;
  static constexpr std::int64_t kT = 20, kH = 2, kK = 8, kV = 8;

  Memory() {
    const std::size_t n = static_cast<std::size_t>(kT * kH * kK);
    for (auto* x : {&q, &k, &v, &g, &o}) x->assign(n, -0.25F);
    state.assign(static_cast<std::size_t>(kH * kK * kV), 0.5F);
    args.q = {q.data(), {1, kT, kH, kK}};
    args.k = {k.data(), {1, kT, kH, kK}};
    args.v = {v.data(), {1, kT, kH, kV}};
    args.g = {g.data(), {1, kT, kH, kK}};
    args.o = {o.data(), {1, kT, kH, kV}};
  }
};

void expect_refused(const Status& s, const std::string& text) {
  EXPECT_EQ(s.code(), Code::InvalidArgument);
  EXPECT_NE(s.message().find(text), std::string::npos) << s.message();
}

TEST(Overlap, AnOutputOverAnInputIsRefusedAndNothingWritten) {
  const Context ctx;
  Memory m;
  for (TensorView GlaArgs::*input : {&GlaArgs::q, &GlaArgs::k, &GlaArgs::v, &GlaArgs::g}) {
    GlaArgs a = m.args;
    a.o = a.*input;
    expect_refused(chunk_gla(ctx, a), "chunk_gla: o: overlaps ");
  }
  for (const float x : m.q) ASSERT_EQ(x, -0.25F);
}

TEST(Overlap, APartlySharedStateIsRefusedAndTheSameStateIsNot) {
  const Context ctx;
  Memory m;
  m.args.initial_state = {m.state.data(), {1, Memory::kH, Memory::kK, Memory::kV}};
  m.args.final_state = m.args.initial_state;
  EXPECT_TRUE(fused_recurrent_gla(ctx, m.args).ok());
  m.state.resize(m.state.size() + 3);
  m.args.initial_state.data = m.state.data();
  m.args.final_state.data = m.state.data() + 3;
  expect_refused(fused_recurrent_gla(ctx, m.args), "final_state: overlaps initial_state");
}

TEST(Overlap, SlicesOfOneFusedTensorAreLegal) {
  const Context ctx;
  Memory m;
  std::vector<float> fused(static_cast<std::size_t>(2 * Memory::kT * Memory::kH * Memory::kV), -0.25F);
  m.args.v.data = fused.data();
  m.args.o.data = fused.data() + Memory::kH * Memory::kV;
  m.args.v.stride[1] = m.args.o.stride[1] = 2 * Memory::kH * Memory::kV;
  m.args.v.stride[0] = m.args.o.stride[0] = 2 * Memory::kT * Memory::kH * Memory::kV;
  EXPECT_TRUE(chunk_gla(ctx, m.args).ok());
}

TEST(Overlap, AnOutputOverItselfIsRefused) {
  const Context ctx;
  Memory m;
  m.args.o.stride[1] = 1;
  expect_refused(chunk_gla(ctx, m.args), "chunk_gla: o: an output whose elements overlap");
}

TEST(Overlap, MisalignedDataAndTooManyAxesAreRefused) {
  const Context ctx;
  Memory m;
  GlaArgs a = m.args;
  a.q.data = reinterpret_cast<std::byte*>(m.q.data()) + 1;
  expect_refused(chunk_gla(ctx, a), "chunk_gla: q: data pointer is not aligned");
  a = m.args;
  a.initial_state = {m.state.data(), {1, 1, 1, 1, Memory::kH, Memory::kK, Memory::kV}};
  expect_refused(chunk_gla(ctx, a), "chunk_gla: initial_state: expected rank 4");
}

TEST(Overlap, SizesWhoseProductsOverflowAreRefused) {
  const Context ctx;
  Memory m;
  const std::int64_t K = std::int64_t{1} << 60;
  for (TensorView GlaArgs::*wide : {&GlaArgs::q, &GlaArgs::k, &GlaArgs::g}) {
    TensorView& t = m.args.*wide;
    t.shape = {1, 1, 1, K};
    t.stride = {};
  }
  m.args.v = {m.v.data(), {1, 1, 1, 4}};
  m.args.o = {m.o.data(), {1, 1, 1, 4}};
  EXPECT_EQ(chunk_gla(ctx, m.args).code(), Code::InvalidArgument);
}

}  // namespace
}  // namespace fla
