// What host code knows of an accelerator: its limits and the stream that a call runs on. No CUDA header is needed.
#pragma once

#include <cstddef>

namespace fla {

struct DeviceInfo {
  int index = 0;
  int sm = 0;                             // compute capability times ten: 80, 90
  int sm_count = 0;                       // multiprocessors
  std::size_t shared_per_block = 0;       // most dynamic shared memory of a block, in bytes
  std::size_t shared_per_sm = 0;          // what the resident blocks of a multiprocessor share
  std::size_t shared_reserved_block = 0;  // what the system takes of it for each resident block
  std::size_t l2_bytes = 0;
};

// A cudaStream_t (nullptr: the default stream) and the device it belongs to. Not owned.
struct Stream {
  void* handle = nullptr;
  int device = 0;
};

}  // namespace fla
