// The machine that kernels are written for: thread indices, shared memory, barriers, warp exchange, asynchronous
// copies, tensor-core instructions, launches. One kernel source compiles two ways:
//   nvcc                      CUDA C++ with PTX, for compute capability 8.0 and newer (simt_device.cuh)
//   C++, FLA_CUDA_EMULATE     each CUDA thread is a fiber of one host thread (emulated/). What a GPU leaves undefined
//                             is an error there: races, divergent barriers, reads of what a cp.async has not
//                             delivered, of unwritten shared memory, out of bounds, misaligned
// Kernel code contains no #ifdef. Rules that both sides need:
//   - shared memory is only reached through Shared<T>; `auto x = s[i]` is a reference, write the type out;
//   - blocks have a multiple of 32 threads; warp functions are called by all 32 lanes together;
//   - shuffles, mma and ldmatrix order no shared memory between lanes: sync_warp() does.
#pragma once

#include "fla/kernels/cuda/launch.h"

#if defined(FLA_CUDA_EMULATE)
#include "fla/kernels/cuda/emulated/simt_emulated.cuh"
#else
#include "fla/kernels/cuda/simt_device.cuh"
#endif

namespace fla::cuda {

inline constexpr float kLog2e = 1.44269504F;  // e^x = exp2(x kLog2e)

}  // namespace fla::cuda
