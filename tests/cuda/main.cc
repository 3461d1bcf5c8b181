// Exit status 77, which ctest shows as skipped, on a machine without a GPU.
#include <gtest/gtest.h>

#include <cstdio>

#include "fla/kernels/cuda/launch.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const auto info = fla::cuda::device_info(0);
  if (!info) {
    std::printf("fla_cuda_test: %s\n", info.status().message().c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
