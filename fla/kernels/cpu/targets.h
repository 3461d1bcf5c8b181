// Which of Highway's targets the CPU kernels are compiled for; include before hwy/foreach_target.h.
// x86: baseline (old machines), AVX2, AVX3. SSE would double the build for machines nobody times, AVX3_DL adds nothing
// to fp32 arithmetic. Arm: NEON. SVE vectors have no size and cannot be kept in arrays, which the register tiles are.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
