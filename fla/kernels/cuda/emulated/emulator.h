// The machine of simt.cuh on the CPU, for tests. A launch runs its blocks one after another on the calling thread; each
// CUDA thread of a block is a fiber that runs until it has to wait for others, so a run is repeatable. Shared memory is
// shadowed: every two bytes know who wrote and who read them last, and vector clocks that advance at barriers tell
// whether two accesses are ordered. The first fault ends the launch, whose Status names it. x86-64 only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fla/kernels/cuda/launch.h"

namespace fla::cuda::emulator {

struct Options {
  bool shuffle = false;    // run fibers and blocks in a random order instead of the order of their numbers
  std::uint64_t seed = 1;  // of that order
  bool races = true;       // report unordered accesses to shared memory
  bool unwritten = true;   // report reads of shared memory that nobody wrote
  DeviceInfo device = {.index = 0,
                       .sm = 90,
                       .sm_count = 132,
                       .shared_per_block = 232448,
                       .shared_per_sm = 233472,
                       .shared_reserved_block = 1024,
                       .l2_bytes = std::size_t{50} << 20};
};
Options& options();  // of the calling host thread

// A run with offsets that pass 32 bits, without the memory for it. A first run notes the blocks of each launch. A second
// one, of the same problem behind so many others that they fill a large grid, runs as many of each launch from its end:
// of the others' tensors only addresses are needed, which no block forms (tests/cuda/far_test.cc).
struct Tail {
  enum class Mode : std::uint8_t { Off, Note, Cut } mode = Mode::Off;
  std::vector<std::int64_t> blocks = {};  // of each launch that was noted
  std::size_t next = 0;                   // of them, while cutting
  // Equal parts of this kernel's grid, each of which ends with blocks of the problem.
  int (*parts)(const char* kernel) = nullptr;
};
Tail& tail();  // of the calling host thread

struct Counters {
  std::int64_t launches = 0, blocks = 0, barriers = 0, mma = 0;
};
Counters& counters();  // of the calling host thread

// Memory that only kernels may touch: outside launches every access ends the program, inside a launch an access beyond
// its end is an error of the launch. Starts as NaN. With FLA_CPP_EMULATOR_SHARED set the host may touch it too: for
// programs that load several builds of the library, each with an emulator of its own. A sparse one starts as zeros and
// takes memory only where it is touched.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes, bool sparse = false);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  void upload(const void* from);
  void download(void* to) const;

 private:
  friend class OpenDeviceMemory;
  void protect(bool open) const;
  std::byte* map_ = nullptr;
  std::size_t map_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// While one lives, everybody may touch the buffers.
class OpenDeviceMemory {
 public:
  OpenDeviceMemory();
  ~OpenDeviceMemory();
  OpenDeviceMemory(const OpenDeviceMemory&) = delete;
  OpenDeviceMemory& operator=(const OpenDeviceMemory&) = delete;
};

Status run(const Launch& l, void (*body)(void*), void* arg);

// ---- what simt_emulated.cuh calls from inside a kernel

struct Self {
  int thread = 0, threads = 0;
  Dim3 block, grid;
};
const Self& self();

// Ends the launch with this message. The stack is abandoned: what the caller still holds on the heap is lost.
[[noreturn]] void fail(std::string message);

std::byte* shared_memory();
std::size_t shared_bytes();
void note_read(const void* p, std::size_t bytes);
void note_write(const void* p, std::size_t bytes);
void check_aligned(const void* p, std::size_t bytes, const char* what);

void sync_threads(const char* file, int line);
void barrier(int id, int count, bool wait);
void wait_for_previous();  // only that every thread of an overlapped launch calls it is checked
void sync_warp();
// Waits for all lanes of the warp in the same call; the last to come calls `fn` on everybody's data.
void warp_together(const char* what, void* data, void (*fn)(void* const* lanes));

void cp_async(void* dst, const void* src, int bytes, int valid);
void cp_async_commit();
void cp_async_wait(int left);

}  // namespace fla::cuda::emulator
