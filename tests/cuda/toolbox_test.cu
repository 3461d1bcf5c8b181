// The CUDA toolbox: what tensor-core tiles, tiles in memory and warp functions compute. Runs on a GPU and in the
// emulator.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fla/kernels/cuda/toolbox.cuh"
#include "tests/cuda/device_array.h"

namespace fla::cuda {
namespace {

std::vector<float> random_floats(std::size_t n, unsigned seed) {
  std::mt19937 r(seed);
  std::normal_distribution<float> d;
  std::vector<float> v(n);
  for (float& x : v) x = d(r);
  return v;
}

template <typename T>
T convert(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(x);
  } else {
    return to_f16(x);
  }
}

template <typename T>
std::vector<T> random_values(std::size_t n, unsigned seed) {
  std::vector<T> v;
  for (const float x : random_floats(n, seed)) v.push_back(convert<T>(x));
  return v;
}

// ---- tensor cores

enum class Store { Plain, Transposed };

// c = a b of 64 x 64 x 64 through shared memory; a stored [m][k] or [k][m], b stored [n][k] or [k][n].
template <typename T, Store A, Store B>
FLA_KERNEL(128, 1)
product_kernel(const T* a, const T* b, float* c) {
  constexpr int kLd = 72;
  const Shared<T> sa = shared<T>(0, 64 * kLd), sb = shared<T>(64 * kLd * 2, 64 * kLd);
  copy_tile<true, 64, 64>(sa, kLd, a, 64, 1, 64, 64, thread_id(), block_threads());
  cp_async_commit();
  copy_tile<true, 64, 64>(sb, kLd, b, 64, 1, 64, 64, thread_id(), block_threads());
  cp_async_commit();
  cp_async_wait<0>();
  sync_threads();
  const int m = 16 * warp_id();
  FragC acc[8];
  for (FragC& x : acc) clear(x);
  for (int k = 0; k < 64; k += 16) {
    FragA<T> fa;
    if constexpr (A == Store::Plain) {
      load_a(fa, sa + (m * kLd + k), kLd);
    } else {
      load_a_trans(fa, sa + (k * kLd + m), kLd);
    }
    for (int j = 0; j < 8; j += 2) {
      FragB<T> b0, b1;
      if constexpr (B == Store::Plain) {
        load_b(b0, b1, sb + (8 * j * kLd + k), kLd);
      } else {
        load_b_trans(b0, b1, sb + (k * kLd + 8 * j), kLd);
      }
      mma(acc[j], fa, b0);
      mma(acc[j + 1], fa, b1);
    }
  }
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 4; ++i) c[(m + frag_row(i)) * 64 + 8 * j + frag_col(i)] = acc[j].x[i];
  }
}

template <typename T, Store A, Store B>
void expect_product() {
  const auto a = random_values<T>(4096, 1), b = random_values<T>(4096, 2);
  const DeviceArray<T> da(a), db(b);
  const DeviceArray<float> dc(4096);
  const Status s =
      launch<product_kernel<T, A, B>>({.name = "product", .grid = {1}, .threads = 128, .shared_bytes = 2 * 64 * 72 * 2},
                                      {}, da.data(), db.data(), dc.data());
  ASSERT_TRUE(s.ok()) << s.message();
  const auto c = dc.get();
  for (std::size_t m = 0; m < 64; ++m) {
    for (std::size_t n = 0; n < 64; ++n) {
      double sum = 0;
      for (std::size_t k = 0; k < 64; ++k) {
        sum += static_cast<double>(to_float(a[A == Store::Plain ? m * 64 + k : k * 64 + m])) *
               static_cast<double>(to_float(b[B == Store::Plain ? n * 64 + k : k * 64 + n]));
      }
      ASSERT_NEAR(c[m * 64 + n], sum, 1e-4) << m << " " << n;
    }
  }
}

TEST(CudaToolbox, TileProductsOfEveryStorage) {
  expect_product<bf16, Store::Plain, Store::Plain>();
  expect_product<bf16, Store::Transposed, Store::Plain>();
  expect_product<bf16, Store::Plain, Store::Transposed>();
  expect_product<f16, Store::Transposed, Store::Transposed>();
  expect_product<f16, Store::Plain, Store::Plain>();
}

// Registers filled and read lane by lane with the layout of the PTX manual, without the tile loads.
FLA_KERNEL(32, 1)
fragment_kernel(const bf16* a, const bf16* b, float* c) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  const auto pair = [](const bf16* p, int step) {
    return std::uint32_t{p[0].bits} | std::uint32_t{p[step].bits} << 16;
  };
  const FragA<bf16> fa = {{pair(a + g * 16 + 2 * t, 1), pair(a + (g + 8) * 16 + 2 * t, 1),
                           pair(a + g * 16 + 2 * t + 8, 1), pair(a + (g + 8) * 16 + 2 * t + 8, 1)}};
  const FragB<bf16> fb = {{pair(b + 2 * t * 8 + g, 8), pair(b + (2 * t + 8) * 8 + g, 8)}};
  FragC fc;
  clear(fc);
  mma(fc, fa, fb);
  c[g * 8 + 2 * t] = fc.x[0];
  c[g * 8 + 2 * t + 1] = fc.x[1];
  c[(g + 8) * 8 + 2 * t] = fc.x[2];
  c[(g + 8) * 8 + 2 * t + 1] = fc.x[3];
}

TEST(CudaToolbox, FragmentLayout) {
  const auto a = random_values<bf16>(256, 3), b = random_values<bf16>(128, 4);
  const DeviceArray<bf16> da(a), db(b);
  const DeviceArray<float> dc(128);
  const Status s =
      launch<fragment_kernel>({.name = "fragment", .grid = {1}, .threads = 32}, {}, da.data(), db.data(), dc.data());
  ASSERT_TRUE(s.ok()) << s.message();
  const auto c = dc.get();
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 8; ++n) {
      double sum = 0;
      for (std::size_t k = 0; k < 16; ++k) sum += to_float(a[m * 16 + k]) * to_float(b[k * 8 + n]);
      EXPECT_NEAR(c[m * 8 + n], sum, 1e-5);
    }
  }
}

// (a b) is rounded to bf16 and used, without leaving the registers, as A, as B and transposed as B of further products.
FLA_KERNEL(32, 1)
repack_kernel(const bf16* a, const bf16* b, const bf16* e, float* as_a, float* as_b, float* as_bt) {
  constexpr int kLd = 24;
  const Shared<bf16> s[3] = {shared<bf16>(0, 16 * kLd), shared<bf16>(768, 16 * kLd), shared<bf16>(1536, 16 * kLd)};
  const bf16* from[3] = {a, b, e};
  for (int i = 0; i < 3; ++i) copy_tile<false, 16, 16>(s[i], kLd, from[i], 16, 1, 16, 16, lane_id(), 32);
  sync_warp();
  FragA<bf16> fa, fe;
  FragB<bf16> b0, b1, e0, e1;
  load_a(fa, s[0], kLd);
  load_b_trans(b0, b1, s[1], kLd);
  load_a(fe, s[2], kLd);
  load_b_trans(e0, e1, s[2], kLd);
  FragC left, right, out[6];
  clear(left);
  clear(right);
  for (FragC& x : out) clear(x);
  mma(left, fa, b0);
  mma(right, fa, b1);
  const FragA<bf16> p = to_a<bf16>(left, right);
  mma(out[0], p, e0);  // (a b) e
  mma(out[1], p, e1);
  mma(out[2], fe, to_b<bf16>(left));  // e (a b)
  mma(out[3], fe, to_b<bf16>(right));
  FragB<bf16> t0, t1;
  to_b_transposed(t0, t1, left, right);
  mma(out[4], fe, t0);  // e (a b)^T
  mma(out[5], fe, t1);
  float* to[3] = {as_a, as_b, as_bt};
  for (int j = 0; j < 6; ++j) {
    for (int i = 0; i < 4; ++i) to[j / 2][frag_row(i) * 16 + 8 * (j % 2) + frag_col(i)] = out[j].x[i];
  }
}

TEST(CudaToolbox, AccumulatorsBecomeOperands) {
  const auto a = random_values<bf16>(256, 5), b = random_values<bf16>(256, 6), e = random_values<bf16>(256, 7);
  const DeviceArray<bf16> da(a), db(b), de(e);
  const DeviceArray<float> x(256), y(256), z(256);
  const Status s = launch<repack_kernel>({.name = "repack", .grid = {1}, .threads = 32, .shared_bytes = 2304}, {},
                                         da.data(), db.data(), de.data(), x.data(), y.data(), z.data());
  ASSERT_TRUE(s.ok()) << s.message();
  const auto as_a = x.get(), as_b = y.get(), as_bt = z.get();
  float p[16][16], f[16][16];
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 16; ++n) {
      float sum = 0;
      for (std::size_t k = 0; k < 16; ++k) sum += to_float(a[m * 16 + k]) * to_float(b[k * 16 + n]);
      p[m][n] = to_float(to_bf16(sum));
      f[m][n] = to_float(e[m * 16 + n]);
    }
  }
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 16; ++n) {
      double pe = 0, ep = 0, ept = 0;
      for (std::size_t k = 0; k < 16; ++k) {
        pe += p[m][k] * f[k][n];
        ep += f[m][k] * p[k][n];
        ept += f[m][k] * p[n][k];
      }
      EXPECT_NEAR(as_a[m * 16 + n], pe, 1e-3);
      EXPECT_NEAR(as_b[m * 16 + n], ep, 1e-3);
      EXPECT_NEAR(as_bt[m * 16 + n], ept, 1e-3);
    }
  }
}

FLA_KERNEL(32, 1)
tf32_kernel(const float* a, const float* b, float* once, float* thrice) {
  const Shared<float> sa = shared<float>(0, 128), sb = shared<float>(512, 64);
  copy_tile<true, 16, 8>(sa, 8, a, 8, 1, 16, 8, lane_id(), 32);
  copy_tile<true, 8, 8>(sb, 8, b, 8, 1, 8, 8, lane_id(), 32);
  cp_async_commit();
  cp_async_wait<0>();
  sync_warp();
  FragATf32 fa, ra;
  FragBTf32 fb, rb;
  load_a(fa, sa, 8, 1);
  load_b(fb, sb, 8, 1);
  for (int i = 0; i < 4; ++i) ra.x[i] = to_tf32(fa.x[i]);
  for (int i = 0; i < 2; ++i) rb.x[i] = to_tf32(fb.x[i]);
  FragC c1, c3;
  clear(c1);
  clear(c3);
  mma(c1, ra, rb);
  mma_3xtf32(c3, fa, fb);
  for (int i = 0; i < 4; ++i) {
    once[frag_row(i) * 8 + frag_col(i)] = c1.x[i];
    thrice[frag_row(i) * 8 + frag_col(i)] = c3.x[i];
  }
}

TEST(CudaToolbox, Tf32AndItsSplit) {
  const auto a = random_floats(128, 8), b = random_floats(64, 9);
  const DeviceArray<float> da(a), db(b), once(128), thrice(128);
  const Status s = launch<tf32_kernel>({.name = "tf32", .grid = {1}, .threads = 32, .shared_bytes = 768}, {}, da.data(),
                                       db.data(), once.data(), thrice.data());
  ASSERT_TRUE(s.ok()) << s.message();
  const auto c1 = once.get(), c3 = thrice.get();
  double worst1 = 0, worst3 = 0;
  for (std::size_t m = 0; m < 16; ++m) {
    for (std::size_t n = 0; n < 8; ++n) {
      double sum = 0;
      for (std::size_t k = 0; k < 8; ++k) sum += static_cast<double>(a[m * 8 + k]) * b[k * 8 + n];
      worst1 = std::max(worst1, std::abs(c1[m * 8 + n] - sum));
      worst3 = std::max(worst3, std::abs(c3[m * 8 + n] - sum));
    }
  }
  EXPECT_LT(worst1, 1e-2);
  EXPECT_GT(worst1, 1e-5);  // it is tf32
  EXPECT_LT(worst3, 5e-6);
}

// ---- tiles, warps, grids

template <bool VECTOR>
FLA_KERNEL(64, 1)
tile_kernel(const bf16* a, bf16* whole, bf16* part) {
  const Shared<bf16> s = shared<bf16>(0, 16 * 40);
  copy_tile<VECTOR, 16, 32>(s, 40, a, 48, 1, 11, 27, thread_id(), 64);
  cp_async_commit();
  cp_async_wait<0>();
  sync_threads();
  store_tile<VECTOR, 16, 32>(whole, 32, 1, s, 40, 16, 32, thread_id(), 64);
  store_tile<VECTOR, 16, 32>(part, 32, 1, s, 40, 9, 21, thread_id(), 64);
}

TEST(CudaToolbox, RaggedTiles) {
  const auto a = random_values<bf16>(11 * 48, 10);
  const DeviceArray<bf16> da(a);
  for (const bool vector : {false, true}) {
    const DeviceArray<bf16> whole(16 * 32), part(16 * 32);
    const Launch l{.name = "tile", .grid = {1}, .threads = 64, .shared_bytes = 16 * 40 * 2};
    const Status s = vector ? launch<tile_kernel<true>>(l, {}, da.data(), whole.data(), part.data())
                            : launch<tile_kernel<false>>(l, {}, da.data(), whole.data(), part.data());
    ASSERT_TRUE(s.ok()) << s.message();
    const auto w = whole.get(), p = part.get();
    for (std::size_t r = 0; r < 16; ++r) {
      for (std::size_t c = 0; c < 32; ++c) {
        EXPECT_EQ(w[r * 32 + c].bits, r < 11 && c < 27 ? a[r * 48 + c].bits : 0);
        EXPECT_EQ(p[r * 32 + c].bits, r < 9 && c < 21 ? a[r * 48 + c].bits : 0xffff);
      }
    }
  }
}

FLA_KERNEL(64, 1)
warp_kernel(float* sum, float* prefix, float* rest, std::uint32_t* votes, int* lowest) {
  const auto x = static_cast<float>(thread_id());
  sum[thread_id()] = warp_sum(x);
  prefix[thread_id()] = warp_prefix_sum(x);
  rest[thread_id()] = warp_max<8>(x) + 100.0F * shuffle(x, 3) + 10000.0F * shuffle_down(x, 1);
  votes[thread_id()] = ballot(thread_id() % 3 == 0);
  lowest[thread_id()] = lowest_bit(0x80000001U << (thread_id() % 32));
}

TEST(CudaToolbox, WarpExchange) {
  const DeviceArray<float> sum(64), prefix(64), rest(64);
  const DeviceArray<std::uint32_t> votes(64);
  const DeviceArray<int> lowest(64);
  for (int order = 0; order < kOrders; ++order) {
    use_order(order);
    const Status s = launch<warp_kernel>({.name = "warp", .grid = {1}, .threads = 64}, {}, sum.data(), prefix.data(),
                                         rest.data(), votes.data(), lowest.data());
    ASSERT_TRUE(s.ok()) << s.message();
    const auto su = sum.get(), pr = prefix.get(), re = rest.get();
    const auto vo = votes.get();
    for (int i = 0; i < 64; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const int first = i / 32 * 32, n = i - first;
      EXPECT_EQ(su[at], static_cast<float>(32 * first + 496));
      EXPECT_EQ(lowest.get()[at], n);
      EXPECT_EQ(pr[at], static_cast<float>((n + 1) * first + n * (n + 1) / 2));
      const int below = n == 31 ? i : i + 1;
      EXPECT_EQ(re[at], static_cast<float>((i | 7) + 100 * (first + 3) + 10000 * below));
      EXPECT_EQ(vo[at], first == 0 ? 0x49249249U : 0x92492492U);
    }
  }
}

FLA_KERNEL(32, 1)
grid_kernel(int* hits) {
  if (thread_id() != 5) return;
  hits[(block_z() * grid_y() + block_y()) * grid_x() + block_x()] += 1;
}

TEST(CudaToolbox, EveryBlockRunsOnce) {
  for (int order = 0; order < kOrders; ++order) {
    use_order(order);
    const DeviceArray<int> hits(std::vector<int>(30, 0));
    const Status s = launch<grid_kernel>({.name = "grid", .grid = {5, 3, 2}, .threads = 32}, {}, hits.data());
    ASSERT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(hits.get(), std::vector<int>(30, 1));
  }
  EXPECT_TRUE(launch<grid_kernel>({.name = "grid", .grid = {0}, .threads = 32}, {}, static_cast<int*>(nullptr)).ok());
}

FLA_KERNEL(32, 1)
scalar_kernel(const float* in, int n, std::uint32_t* bf16s, std::uint32_t* f16s, float* tf32s, float* powers) {
  for (int i = thread_id(); i < n; i += block_threads()) {
    bf16s[i] = pack2<bf16>(in[i], -in[i]);
    f16s[i] = pack2<f16>(in[i], -in[i]);
    tf32s[i] = to_tf32(in[i]);
    powers[i] = exp2_approx(in[i]);
  }
}

TEST(CudaToolbox, Scalars) {
  const std::vector<float> x = {0.0F, -0.0F, 1.0F, 1.00390625F, -3.1415926F, 120.0F, 1e-6F, -127.5F, -1000.0F, 3e38F};
  const DeviceArray<float> in(x), tf32s(x.size()), powers(x.size());
  const DeviceArray<std::uint32_t> bf16s(x.size()), f16s(x.size());
  const Status s =
      launch<scalar_kernel>({.name = "scalar", .grid = {1}, .threads = 32}, {}, in.data(), static_cast<int>(x.size()),
                            bf16s.data(), f16s.data(), tf32s.data(), powers.data());
  ASSERT_TRUE(s.ok()) << s.message();
  const auto b = bf16s.get(), h = f16s.get();
  const auto t = tf32s.get(), p = powers.get();
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(b[i], std::uint32_t{to_bf16(x[i]).bits} | std::uint32_t{to_bf16(-x[i]).bits} << 16);
    EXPECT_EQ(h[i], std::uint32_t{to_f16(x[i]).bits} | std::uint32_t{to_f16(-x[i]).bits} << 16);
    EXPECT_NEAR(t[i], x[i], std::fabs(x[i]) * 0x1p-11F);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(t[i]) & 0x1fffU, 0U);
    const double power = std::exp2(static_cast<double>(x[i]));
    if (power < 0x1p-126) {
      EXPECT_EQ(p[i], 0.0F);
    } else if (power < 3e38) {
      EXPECT_NEAR(p[i] / power, 1.0, 3e-7);
    } else {
      EXPECT_TRUE(std::isinf(p[i]));
    }
  }
}

TEST(CudaToolbox, Vectorizable) {
  alignas(16) bf16 data[256];
  EXPECT_TRUE(vectorizable(TensorView(data, {2, 4, 32})));
  EXPECT_TRUE(vectorizable(TensorView(data, {1, 3})));
  EXPECT_FALSE(vectorizable(TensorView(data + 1, {2, 32})));
  EXPECT_FALSE(vectorizable(TensorView(data, {2, 30})));
  TensorView strided(data, {2, 32});
  strided.stride[1] = 2;
  EXPECT_FALSE(vectorizable(strided));
  EXPECT_TRUE(vectorizable(TensorView()));
}

}  // namespace
}  // namespace fla::cuda
