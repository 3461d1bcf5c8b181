// The machine of simt.cuh on a GPU. Included by simt.cuh only.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#define FLA_KERNEL(threads, min_blocks) __global__ void __launch_bounds__(threads, min_blocks)
#define FLA_DEVICE __device__ __forceinline__
#define FLA_HOST_DEVICE __host__ __device__ __forceinline__
#define FLA_UNROLL _Pragma("unroll")
#define FLA_ROLL _Pragma("unroll 1")

#include "fla/kernels/cuda/block_index.cuh"

namespace fla::cuda {

FLA_DEVICE int thread_id() { return static_cast<int>(threadIdx.x); }
FLA_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
FLA_DEVICE int lane_id() { return static_cast<int>(threadIdx.x & 31U); }
FLA_DEVICE int warp_id() { return static_cast<int>(threadIdx.x >> 5U); }
FLA_DEVICE BlockIndex block_x() { return {static_cast<int>(blockIdx.x)}; }
FLA_DEVICE BlockIndex block_y() { return {static_cast<int>(blockIdx.y)}; }
FLA_DEVICE BlockIndex block_z() { return {static_cast<int>(blockIdx.z)}; }
FLA_DEVICE BlockIndex grid_x() { return {static_cast<int>(gridDim.x)}; }
FLA_DEVICE BlockIndex grid_y() { return {static_cast<int>(gridDim.y)}; }
FLA_DEVICE BlockIndex grid_z() { return {static_cast<int>(gridDim.z)}; }

// ---- shared memory

template <typename T>
class Shared {
 public:
  FLA_DEVICE Shared() : p_(nullptr) {}
  FLA_DEVICE explicit Shared(T* p) : p_(p) {}
  FLA_DEVICE T& operator[](int i) const { return p_[i]; }
  FLA_DEVICE Shared operator+(int i) const { return Shared(p_ + i); }
  FLA_DEVICE T load(int i) const { return p_[i]; }
  FLA_DEVICE void store(int i, T v) const { p_[i] = v; }
  template <int N>
  FLA_DEVICE Vec<T, N> load_vec(int i) const {
    return *reinterpret_cast<const Vec<T, N>*>(p_ + i);
  }
  template <int N>
  FLA_DEVICE void store_vec(int i, const Vec<T, N>& v) const {
    *reinterpret_cast<Vec<T, N>*>(p_ + i) = v;
  }
  template <typename U>
  FLA_DEVICE Shared<U> as() const {
    return Shared<U>(reinterpret_cast<U*>(p_));
  }
  FLA_DEVICE std::uint32_t address() const { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p_)); }

 private:
  T* p_;
};

// `count` elements of the block's dynamic shared memory from byte `offset` on; only the emulator looks at the count.
template <typename T>
FLA_DEVICE Shared<T> shared(int offset, int /*count*/) {
  extern __shared__ __align__(1024) unsigned char fla_dynamic_shared[];
  return Shared<T>(reinterpret_cast<T*>(fla_dynamic_shared + offset));
}

// ---- barriers

FLA_DEVICE void sync_threads() { __syncthreads(); }
FLA_DEVICE void sync_warp() { __syncwarp(); }
// As sync_threads for a block of COUNT threads whose warps have different work: they may come from different places of
// the code, which bar.sync, the aligned form, does not allow. Takes barrier 15.
template <int COUNT>
FLA_DEVICE void sync_roles() {
  asm volatile("barrier.sync 15, %0;" ::"n"(COUNT) : "memory");
}
// Barrier `id` (1 to 15) of `count` threads, a multiple of 32; arrive does not wait.
FLA_DEVICE void barrier_sync(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
FLA_DEVICE void barrier_arrive(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// ---- the launch before and after on the stream, see Launch::overlapped

// Waits until all that was launched before on the stream has ended and shows what it wrote. Nothing that such a launch
// reads may be written before that, nor anything be read that it writes.
FLA_DEVICE void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Blocks of the next launch may start where there is room once every block of this one has come here.
FLA_DEVICE void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- warp exchange: T has 4 or 8 bytes

template <typename T>
FLA_DEVICE T shuffle(T v, int source_lane) {
  return __shfl_sync(0xffffffffU, v, source_lane);
}
template <typename T>
FLA_DEVICE T shuffle_xor(T v, int mask) {
  return __shfl_xor_sync(0xffffffffU, v, mask);
}
template <typename T>
FLA_DEVICE T shuffle_up(T v, int by) {
  return __shfl_up_sync(0xffffffffU, v, static_cast<unsigned>(by));
}
template <typename T>
FLA_DEVICE T shuffle_down(T v, int by) {
  return __shfl_down_sync(0xffffffffU, v, static_cast<unsigned>(by));
}
FLA_DEVICE std::uint32_t ballot(bool v) { return __ballot_sync(0xffffffffU, v); }
// Number of the lowest bit that is set; x is not 0.
FLA_DEVICE int lowest_bit(std::uint32_t x) { return __ffs(static_cast<int>(x)) - 1; }

// ---- global memory

template <int N, typename T>
FLA_DEVICE Vec<T, N> load_global(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, typename T>
FLA_DEVICE void store_global(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// Copies BYTES (4, 8 or 16) to shared memory, of which those past `valid` are zeros; valid = 0 reads nothing. Visible
// to this thread after cp_async_wait, to others after a barrier beyond it.
template <int BYTES, typename T>
FLA_DEVICE void cp_async(Shared<T> dst, const T* src, int valid) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst.address()), "l"(src), "r"(valid) : "memory");
  } else {
    static_assert(BYTES == 4 || BYTES == 8);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst.address()), "l"(src), "n"(BYTES), "r"(valid)
                 : "memory");
  }
}
FLA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT of this thread's committed groups are under way.
template <int LEFT>
FLA_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- scalar instructions, each of a stated accuracy

// 2^x with 2 ulp, subnormal results are 0
FLA_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(x) with 2^-22 absolute near 1, 1 ulp elsewhere
FLA_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLA_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLA_DEVICE float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

FLA_DEVICE float bits_to_float(std::uint32_t u) { return __uint_as_float(u); }
FLA_DEVICE std::uint32_t float_to_bits(float x) { return __float_as_uint(x); }
FLA_DEVICE float to_f32(float x) { return x; }
FLA_DEVICE float to_f32(bf16 x) { return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16); }
FLA_DEVICE float to_f32(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
template <typename T>
FLA_DEVICE T from_f32(float x);
template <>
FLA_DEVICE float from_f32<float>(float x) {
  return x;
}
template <>
FLA_DEVICE bf16 from_f32<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
FLA_DEVICE f16 from_f32<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
// Two elements in a word, the first in the low half.
template <typename T>
FLA_DEVICE std::uint32_t pack2(float lo, float hi);
template <>
FLA_DEVICE std::uint32_t pack2<bf16>(float lo, float hi) {
  std::uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
template <>
FLA_DEVICE std::uint32_t pack2<f16>(float lo, float hi) {
  std::uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
// Rounded to the 10 mantissa bits of tf32.
FLA_DEVICE float to_tf32(float x) {
  std::uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

// y + 0 x of two elements in a word each: NaN where x is not finite.
template <typename T>
FLA_DEVICE std::uint32_t add_zero_of(std::uint32_t y, std::uint32_t x);
template <>
FLA_DEVICE std::uint32_t add_zero_of<bf16>(std::uint32_t y, std::uint32_t x) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(y) : "r"(x), "r"(0U));
  return y;
}
template <>
FLA_DEVICE std::uint32_t add_zero_of<f16>(std::uint32_t y, std::uint32_t x) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(y) : "r"(x), "r"(0U));
  return y;
}

// ---- tensor cores: see mma.cuh for what the registers hold

template <typename T>
FLA_DEVICE void mma_16816(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
template <>
FLA_DEVICE void mma_16816<bf16>(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
FLA_DEVICE void mma_16816<f16>(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
FLA_DEVICE void mma_1688_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// Four 8x8 matrices of 16-bit elements; lane 8 m + r gives the address of row r of matrix m, 16 bytes aligned.
template <bool TRANS, typename T>
FLA_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], Shared<T> row) {
  static_assert(sizeof(T) == 2);
  if constexpr (TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address())
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row.address())
                 : "memory");
  }
}
// An 8x8 matrix of 16-bit elements in registers (lane l: row l / 4, columns 2 (l % 4) and the next), transposed.
FLA_DEVICE std::uint32_t transpose_8x8(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- launch

Status launch_error(const char* kernel, cudaError_t e);

// Bits by device, which racing calls set to the same value.
class DeviceBits {
 public:
  bool has(int device) const { return (bits_.load(std::memory_order_acquire) & bit(device)) != 0; }
  void set(int device) { bits_.fetch_or(bit(device), std::memory_order_release); }

 private:
  static std::uint64_t bit(int device) { return std::uint64_t{1} << (static_cast<unsigned>(device) & 63U); }
  std::atomic<std::uint64_t> bits_{0};
};

// Starts the kernel on the stream; does not wait. A grid without blocks is no launch.
template <auto KERNEL, typename... A>
Status launch(const Launch& l, Stream stream, A... args) {
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return {};
  if (l.grid.x > kMaxGridX || l.grid.y > kMaxGridYZ || l.grid.z > kMaxGridYZ) {
    return {Code::Unsupported, std::string(l.name) + ": the grid is larger than a device takes"};
  }
  const void* kernel = reinterpret_cast<const void*>(KERNEL);
  if (l.shared_bytes > 48 * 1024) {
    static DeviceBits raised;  // where this kernel may use more than 48 KB
    if (!raised.has(stream.device)) {
      // The limit of the device rather than this launch's need, as a later launch may need more.
      int most = 0;
      cudaError_t e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, stream.device);
      if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      if (e != cudaSuccess) return launch_error(l.name, e);
      raised.set(stream.device);
    }
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  if (l.overlapped) {
    static DeviceBits asked, waits;  // code made for an older device has no wait_for_previous
    if (!asked.has(stream.device)) {
      cudaFuncAttributes code = {};
      if (const cudaError_t e = cudaFuncGetAttributes(&code, kernel); e != cudaSuccess) return launch_error(l.name, e);
      if (code.ptxVersion >= 90) waits.set(stream.device);
      asked.set(stream.device);
    }
    config.attrs = &overlap;
    config.numAttrs = waits.has(stream.device) ? 1 : 0;
  }
  config.gridDim = {static_cast<unsigned>(l.grid.x), static_cast<unsigned>(l.grid.y), static_cast<unsigned>(l.grid.z)};
  config.blockDim = static_cast<unsigned>(l.threads);
  config.dynamicSmemBytes = l.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  const cudaError_t e = cudaLaunchKernelEx(&config, KERNEL, args...);
  return e == cudaSuccess ? Status{} : launch_error(l.name, e);
}

// Zeros `bytes` of device memory in the order of the stream.
Status fill_zero(void* p, std::size_t bytes, Stream stream);

}  // namespace fla::cuda
