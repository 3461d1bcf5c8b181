// Everything that a kernel includes.
#pragma once

#include "fla/kernels/cuda/mma.cuh"
#include "fla/kernels/cuda/simt.cuh"
#include "fla/kernels/cuda/tile.cuh"
#include "fla/kernels/cuda/warp.cuh"
