// What tests of CUDA kernels need around a launch, on a GPU and in the emulator alike.
#pragma once

#include <cstddef>
#include <vector>

#include "fla/core/status.h"

#if defined(FLA_CUDA_EMULATE)
#include "fla/kernels/cuda/emulated/emulator.h"
#else
#include <cuda_runtime.h>

#include <stdexcept>
#endif

namespace fla::cuda {

#if defined(FLA_CUDA_EMULATE)
using DeviceMemory = emulator::DeviceBuffer;

// A test runs once for each: the order of the threads' numbers, then random ones.
inline constexpr int kOrders = 3;
inline void use_order(int i) {
  emulator::options().shuffle = i > 0;
  emulator::options().seed = static_cast<std::uint64_t>(i);
}
inline Status wait_for_device() { return {}; }
#else
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes == 0 ? 1 : bytes));
    check(cudaMemset(data_, 0xff, bytes));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }
  void upload(const void* from) { check(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice)); }
  void download(void* to) const { check(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost)); }

 private:
  static void check(cudaError_t e) {
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
  }
  void* data_ = nullptr;
  std::size_t bytes_;
};

inline constexpr int kOrders = 1;
inline void use_order(int) {}
inline Status wait_for_device() {
  const cudaError_t e = cudaDeviceSynchronize();
  return e == cudaSuccess ? Status{} : Status(Code::DeviceError, cudaGetErrorString(e));
}
#endif

// n elements that start as NaN.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t n) : n_(n), memory_(n * sizeof(T)) {}
  explicit DeviceArray(const std::vector<T>& v) : DeviceArray(v.size()) { memory_.upload(v.data()); }
  T* data() const { return static_cast<T*>(memory_.data()); }
  std::size_t size() const { return n_; }
  std::vector<T> get() const {
    std::vector<T> v(n_);
    memory_.download(v.data());
    return v;
  }

 private:
  std::size_t n_;
  DeviceMemory memory_;
};

}  // namespace fla::cuda
