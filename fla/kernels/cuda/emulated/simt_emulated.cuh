// The machine of simt.cuh on the CPU. Included by simt.cuh only.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "fla/kernels/cuda/emulated/emulator.h"

#define FLA_KERNEL(threads, min_blocks) void
#define FLA_DEVICE inline
#define FLA_HOST_DEVICE inline
#define FLA_UNROLL
#define FLA_ROLL

#include "fla/kernels/cuda/block_index.cuh"

namespace fla::cuda {

FLA_DEVICE int thread_id() { return emulator::self().thread; }
FLA_DEVICE int block_threads() { return emulator::self().threads; }
FLA_DEVICE int lane_id() { return emulator::self().thread % 32; }
FLA_DEVICE int warp_id() { return emulator::self().thread / 32; }
FLA_DEVICE BlockIndex block_x() { return {static_cast<int>(emulator::self().block.x)}; }
FLA_DEVICE BlockIndex block_y() { return {static_cast<int>(emulator::self().block.y)}; }
FLA_DEVICE BlockIndex block_z() { return {static_cast<int>(emulator::self().block.z)}; }
FLA_DEVICE BlockIndex grid_x() { return {static_cast<int>(emulator::self().grid.x)}; }
FLA_DEVICE BlockIndex grid_y() { return {static_cast<int>(emulator::self().grid.y)}; }
FLA_DEVICE BlockIndex grid_z() { return {static_cast<int>(emulator::self().grid.z)}; }

// ---- shared memory

// An element of shared memory: what a reference is on a GPU, with each access reported.
template <typename T>
class SharedRef {
 public:
  explicit SharedRef(T* p) : p_(p) {}
  SharedRef(const SharedRef&) = default;
  operator T() const {  // NOLINT(google-explicit-constructor): stands for T&
    emulator::note_read(p_, sizeof(T));
    return *p_;
  }
  const SharedRef& operator=(T v) const {
    emulator::note_write(p_, sizeof(T));
    *p_ = v;
    return *this;
  }
  const SharedRef& operator=(const SharedRef& o) const { return *this = static_cast<T>(o); }
  const SharedRef& operator+=(T v) const { return *this = static_cast<T>(static_cast<T>(*this) + v); }
  const SharedRef& operator-=(T v) const { return *this = static_cast<T>(static_cast<T>(*this) - v); }
  const SharedRef& operator*=(T v) const { return *this = static_cast<T>(static_cast<T>(*this) * v); }

 private:
  T* p_;
};

template <typename T>
class Shared {
 public:
  Shared() = default;
  Shared(T* p, T* begin, T* end) : p_(p), begin_(begin), end_(end) {}
  SharedRef<T> operator[](int i) const { return SharedRef<T>(at(i, 1)); }
  Shared operator+(int i) const { return Shared(p_ + i, begin_, end_); }
  T load(int i) const { return (*this)[i]; }
  void store(int i, T v) const { (*this)[i] = v; }
  template <int N>
  Vec<T, N> load_vec(int i) const {
    T* p = at(i, N);
    emulator::check_aligned(p, sizeof(T) * N, "vector load from shared memory");
    emulator::note_read(p, sizeof(T) * N);
    return *reinterpret_cast<Vec<T, N>*>(p);
  }
  template <int N>
  void store_vec(int i, const Vec<T, N>& v) const {
    T* p = at(i, N);
    emulator::check_aligned(p, sizeof(T) * N, "vector store to shared memory");
    emulator::note_write(p, sizeof(T) * N);
    *reinterpret_cast<Vec<T, N>*>(p) = v;
  }
  template <typename U>
  Shared<U> as() const {
    return Shared<U>(reinterpret_cast<U*>(p_), reinterpret_cast<U*>(begin_), reinterpret_cast<U*>(end_));
  }
  // Elements [i, i + n), which must lie in the array.
  T* at(int i, int n) const {
    if (p_ + i < begin_ || p_ + i + n > end_) {
      emulator::fail("element " + std::to_string(p_ + i - begin_) + " of a shared array of " +
                     std::to_string(end_ - begin_));
    }
    return p_ + i;
  }

 private:
  T* p_ = nullptr;
  T* begin_ = nullptr;
  T* end_ = nullptr;
};

template <typename T>
FLA_DEVICE Shared<T> shared(int offset, int count) {
  const std::size_t end = static_cast<std::size_t>(offset) + static_cast<std::size_t>(count) * sizeof(T);
  if (offset < 0 || count < 0 || end > emulator::shared_bytes()) {
    emulator::fail("shared array of bytes " + std::to_string(offset) + " to " + std::to_string(end) + " of " +
                   std::to_string(emulator::shared_bytes()));
  }
  T* p = reinterpret_cast<T*>(emulator::shared_memory() + offset);
  emulator::check_aligned(p, sizeof(T), "shared array");
  return Shared<T>(p, p, p + count);
}

// ---- barriers

FLA_DEVICE void sync_threads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::sync_threads(file, line);
}
FLA_DEVICE void sync_warp() { emulator::sync_warp(); }
template <int COUNT>
FLA_DEVICE void sync_roles() {
  emulator::barrier(15, COUNT, true);
}
FLA_DEVICE void barrier_sync(int id, int count) { emulator::barrier(id, count, true); }
FLA_DEVICE void barrier_arrive(int id, int count) { emulator::barrier(id, count, false); }

// ---- the launch before and after: one ends before the next starts here

FLA_DEVICE void wait_for_previous() { emulator::wait_for_previous(); }
FLA_DEVICE void let_next_start() {}

// ---- warp exchange

namespace emulated {

template <typename T>
struct Exchange {
  T in, out;
  int from;
};

template <typename T>
T exchange(const char* what, T v, int from) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  Exchange<T> e{v, v, from};
  emulator::warp_together(what, &e, [](void* const* lanes) {
    for (int i = 0; i < 32; ++i) {
      auto& to = *static_cast<Exchange<T>*>(lanes[i]);
      to.out = static_cast<Exchange<T>*>(lanes[to.from])->in;
    }
  });
  return e.out;
}

}  // namespace emulated

template <typename T>
FLA_DEVICE T shuffle(T v, int source_lane) {
  return emulated::exchange("shuffle", v, source_lane & 31);
}
template <typename T>
FLA_DEVICE T shuffle_xor(T v, int mask) {
  return emulated::exchange("shuffle_xor", v, (lane_id() ^ mask) & 31);
}
template <typename T>
FLA_DEVICE T shuffle_up(T v, int by) {
  return emulated::exchange("shuffle_up", v, lane_id() < by ? lane_id() : lane_id() - by);
}
template <typename T>
FLA_DEVICE T shuffle_down(T v, int by) {
  return emulated::exchange("shuffle_down", v, lane_id() + by > 31 ? lane_id() : lane_id() + by);
}
FLA_DEVICE std::uint32_t ballot(bool v) {
  struct Vote {
    bool in;
    std::uint32_t out;
  } e{v, 0};
  emulator::warp_together("ballot", &e, [](void* const* lanes) {
    std::uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= static_cast<std::uint32_t>(static_cast<Vote*>(lanes[i])->in) << i;
    for (int i = 0; i < 32; ++i) static_cast<Vote*>(lanes[i])->out = all;
  });
  return e.out;
}
FLA_DEVICE int lowest_bit(std::uint32_t x) { return std::countr_zero(x); }

// ---- global memory

template <int N, typename T>
FLA_DEVICE Vec<T, N> load_global(const T* p) {
  emulator::check_aligned(p, sizeof(T) * N, "vector load from global memory");
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, typename T>
FLA_DEVICE void store_global(T* p, const Vec<T, N>& v) {
  emulator::check_aligned(p, sizeof(T) * N, "vector store to global memory");
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

template <int BYTES, typename T>
FLA_DEVICE void cp_async(Shared<T> dst, const T* src, int valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  emulator::cp_async(dst.at(0, BYTES / static_cast<int>(sizeof(T))), src, BYTES, valid);
}
FLA_DEVICE void cp_async_commit() { emulator::cp_async_commit(); }
template <int LEFT>
FLA_DEVICE void cp_async_wait() {
  emulator::cp_async_wait(LEFT);
}

// ---- scalar instructions

FLA_DEVICE float bits_to_float(std::uint32_t u) { return std::bit_cast<float>(u); }
FLA_DEVICE std::uint32_t float_to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
FLA_DEVICE float flush(float x) { return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x; }
FLA_DEVICE float exp2_approx(float x) { return flush(std::exp2(flush(x))); }
FLA_DEVICE float log2_approx(float x) { return std::log2(flush(x)); }
FLA_DEVICE float rcp_approx(float x) { return flush(1.0F / flush(x)); }
FLA_DEVICE float rsqrt_approx(float x) { return 1.0F / std::sqrt(flush(x)); }

FLA_DEVICE float to_f32(float x) { return x; }
FLA_DEVICE float to_f32(bf16 x) { return to_float(x); }
FLA_DEVICE float to_f32(f16 x) { return to_float(x); }
template <typename T>
FLA_DEVICE T from_f32(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(x);
  } else if constexpr (std::is_same_v<T, f16>) {
    return to_f16(x);
  } else {
    static_assert(std::is_same_v<T, float>);
    return x;
  }
}
template <typename T>
FLA_DEVICE std::uint32_t pack2(float lo, float hi) {
  static_assert(sizeof(T) == 2);
  return std::uint32_t{from_f32<T>(lo).bits} | std::uint32_t{from_f32<T>(hi).bits} << 16;
}
FLA_DEVICE float to_tf32(float x) {
  const std::uint32_t u = float_to_bits(x);
  if ((u & 0x7f800000U) == 0x7f800000U) return x;
  return bits_to_float((u + 0x1000U) & 0xffffe000U);  // nearest, ties away from zero
}

template <typename T>
FLA_DEVICE std::uint32_t add_zero_of(std::uint32_t y, std::uint32_t x) {
  const auto half = [](std::uint32_t w, int i) { return to_float(T{static_cast<std::uint16_t>(w >> (16 * i))}); };
  return pack2<T>(half(y, 0) + 0.0F * half(x, 0), half(y, 1) + 0.0F * half(x, 1));
}

// ---- tensor cores

namespace emulated {

struct Mma {
  float* c;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

// The register layouts are those of the PTX manual, written out from its formulas: g = lane / 4, t = lane % 4.
template <typename T>
void mma_16816(void* const* lanes) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& m = *static_cast<const Mma*>(lanes[l]);
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? g : g + 8;
      const int col = 2 * t + (i & 1) + (i < 4 ? 0 : 8);
      a[row][col] = to_float(T{static_cast<std::uint16_t>(m.a[i / 2] >> (16 * (i & 1)))});
    }
    for (int i = 0; i < 4; ++i) {
      b[2 * t + (i & 1) + (i < 2 ? 0 : 8)][g] = to_float(T{static_cast<std::uint16_t>(m.b[i / 2] >> (16 * (i & 1)))});
    }
  }
  for (int l = 0; l < 32; ++l) {
    const auto& m = *static_cast<const Mma*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + (i < 2 ? 0 : 8), col = 2 * (l % 4) + (i & 1);
      float sum = 0.0F;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][col];
      m.c[i] += sum;
    }
  }
  ++emulator::counters().mma;
}

struct MmaTf32 {
  float* c;
  const float* a;
  const float* b;
};

inline void mma_1688_tf32(void* const* lanes) {
  // The hardware reads the upper 19 bits of a register.
  const auto cut = [](float x) { return bits_to_float(float_to_bits(x) & 0xffffe000U); };
  float a[16][8], b[8][8];
  for (int l = 0; l < 32; ++l) {
    const auto& m = *static_cast<const MmaTf32*>(lanes[l]);
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 4; ++i) a[g + 8 * (i & 1)][t + 4 * (i >> 1)] = cut(m.a[i]);
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = cut(m.b[i]);
  }
  for (int l = 0; l < 32; ++l) {
    const auto& m = *static_cast<const MmaTf32*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + (i < 2 ? 0 : 8), col = 2 * (l % 4) + (i & 1);
      float sum = 0.0F;
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][col];
      m.c[i] += sum;
    }
  }
  ++emulator::counters().mma;
}

struct LdMatrix {
  std::uint32_t* r;
  const std::uint16_t* row;
};

}  // namespace emulated

template <typename T>
FLA_DEVICE void mma_16816(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  emulated::Mma m{c, a, b};
  emulator::warp_together("mma_16816", &m, emulated::mma_16816<T>);
}
FLA_DEVICE void mma_1688_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  emulated::MmaTf32 m{c, a, b};
  emulator::warp_together("mma_1688_tf32", &m, emulated::mma_1688_tf32);
}

template <bool TRANS, typename T>
FLA_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], Shared<T> row) {
  static_assert(sizeof(T) == 2);
  const T* p = row.at(0, 8);
  emulator::check_aligned(p, 16, "ldmatrix");
  emulator::note_read(p, 16);
  emulated::LdMatrix m{r, reinterpret_cast<const std::uint16_t*>(p)};
  emulator::warp_together(TRANS ? "ldmatrix_x4.trans" : "ldmatrix_x4", &m, [](void* const* lanes) {
    for (int l = 0; l < 32; ++l) {
      for (int j = 0; j < 4; ++j) {
        std::uint32_t word = 0;
        for (int e = 0; e < 2; ++e) {
          const int line = TRANS ? 2 * (l % 4) + e : l / 4, at = TRANS ? l / 4 : 2 * (l % 4) + e;
          word |= std::uint32_t{static_cast<const emulated::LdMatrix*>(lanes[8 * j + line])->row[at]} << (16 * e);
        }
        static_cast<emulated::LdMatrix*>(lanes[l])->r[j] = word;
      }
    }
  });
}

FLA_DEVICE std::uint32_t transpose_8x8(std::uint32_t x) {
  std::uint32_t word[2] = {x, 0};
  emulator::warp_together("transpose_8x8", word, [](void* const* lanes) {
    std::uint16_t m[8][8];
    for (int l = 0; l < 32; ++l) std::memcpy(&m[l / 4][2 * (l % 4)], lanes[l], 4);
    for (int l = 0; l < 32; ++l) {
      static_cast<std::uint32_t*>(lanes[l])[1] =
          std::uint32_t{m[2 * (l % 4)][l / 4]} | std::uint32_t{m[2 * (l % 4) + 1][l / 4]} << 16;
    }
  });
  return word[1];
}

// ---- launch

template <auto KERNEL, typename... A>
Status launch(const Launch& l, Stream /*stream*/, A... args) {
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return {};
  if (l.grid.x > kMaxGridX || l.grid.y > kMaxGridYZ || l.grid.z > kMaxGridYZ) {
    return {Code::Unsupported, std::string(l.name) + ": the grid is larger than a device takes"};
  }
  auto body = [&args...] { KERNEL(args...); };
  return emulator::run(
      l, [](void* b) { (*static_cast<decltype(body)*>(b))(); }, &body);
}

inline Status fill_zero(void* p, std::size_t bytes, Stream /*stream*/) {
  struct Zero {
    void* p;
    std::size_t bytes;
  } z{p, bytes};
  if (bytes == 0) return {};
  return emulator::run(
      {.name = "memset", .grid = {}, .threads = 32},
      [](void* a) {
        const auto& zero = *static_cast<const Zero*>(a);
        if (thread_id() == 0) std::memset(zero.p, 0, zero.bytes);
      },
      &z);
}

}  // namespace fla::cuda
