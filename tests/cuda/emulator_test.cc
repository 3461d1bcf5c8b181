// The emulator: misuse is reported instead of passed, and right programs are not.
#include "fla/kernels/cuda/emulated/emulator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fla/kernels/cuda/toolbox.cuh"
#include "tests/cuda/device_array.h"

namespace fla::cuda {
namespace {

// Sets the emulator's options for one test.
class CudaEmulator : public ::testing::Test {
 protected:
  ~CudaEmulator() override { emulator::options() = {}; }
};

std::string error(const Status& s) { return s.ok() ? "no error" : s.message(); }

#define EXPECT_FAULT(status, text) \
  EXPECT_NE(error(status).find(text), std::string::npos) << "expected '" << (text) << "', got: " << error(status)

FLA_KERNEL(32, 1)
nothing_kernel() {}

TEST_F(CudaEmulator, RefusesImpossibleLaunches) {
  EXPECT_FAULT(launch<nothing_kernel>({.name = "nothing", .grid = {1, 70000}, .threads = 32}, {}), "grid");
  EXPECT_FAULT(launch<nothing_kernel>({.name = "nothing", .grid = {1}, .threads = 48}, {}), "multiple of 32");
  EXPECT_FAULT(launch<nothing_kernel>({.name = "nothing", .grid = {1}, .threads = 32, .shared_bytes = 300000}, {}),
               "shared memory");
}

FLA_KERNEL(64, 1)
overlapped_kernel(int waiting) {
  let_next_start();
  if (thread_id() < waiting) wait_for_previous();
}

TEST_F(CudaEmulator, EveryThreadOfAnOverlappedLaunchWaits) {
  Launch l{.name = "overlapped", .grid = {2}, .threads = 64};
  EXPECT_EQ(error(launch<overlapped_kernel>(l, {}, 0)), "no error");
  l.overlapped = true;
  EXPECT_EQ(error(launch<overlapped_kernel>(l, {}, 64)), "no error");
  EXPECT_FAULT(launch<overlapped_kernel>(l, {}, 40),
               "thread 40 (warp 1, lane 8): ends an overlapped launch without wait_for_previous");
}

// ---- faults: one kernel, one misuse by number

enum Misuse {
  kNone,
  kReadWithoutBarrier,
  kWriteAfterRead,
  kWriteTwice,
  kNeighbourWithoutSyncWarp,
  kNeighbourWithSyncWarp,
  kSyncInOneBranch,
  kSyncAtTwoPlaces,
  kSyncOfWarpsAtTwoPlaces,
  kRolesAtTwoPlaces,
  kWarpFunctionInOneBranch,
  kTwoWarpFunctions,
  kReturnBeforeSync,
  kProducerConsumer,
  kProducerWithoutArrive,
  kBarrierCounts,
  kCopyWithoutWait,
  kCopyWaitTooEarly,
  kCopyWithoutBarrier,
  kCopyOverRead,
  kCopySecondStage,
  kUnwritten,
  kSharedIndex,
  kSharedArray,
  kSharedVector,
  kGlobalIndex,
  kGlobalVector,
  kDeepStack,
};

int deep(volatile int* p, int n) {
  volatile int room[1024];
  room[n % 1024] = *p + n;
  return n == 0 ? room[0] : deep(room + n % 1024, n - 1) + room[n % 1024];
}

FLA_KERNEL(64, 1)
misuse_kernel(Misuse what, const float* in, float* out) {
  const int t = thread_id();
  const Shared<float> s = shared<float>(0, 64);
  const auto copy = [&](int stage) {
    cp_async<4>(s + t, in + 64 * stage + t, 4);
    cp_async_commit();
  };
  switch (what) {
    case kNone:
      s[t] = in[t];
      sync_threads();
      out[t] = s[63 - t];
      break;
    case kReadWithoutBarrier:
      s[t] = in[t];
      out[t] = s[63 - t];
      break;
    case kWriteAfterRead:
      s[t] = in[t];
      sync_threads();
      out[t] = s[63 - t];
      s[t] = 1.0F;
      break;
    case kWriteTwice: s[t / 2] = in[t]; break;
    case kNeighbourWithoutSyncWarp:
    case kNeighbourWithSyncWarp:
      s[t] = in[t];
      if (what == kNeighbourWithSyncWarp) sync_warp();
      out[t] = s[t ^ 1];
      break;
    case kSyncInOneBranch:
      if (t < 32) sync_threads();
      barrier_sync(1, 64);
      break;
    case kSyncAtTwoPlaces:
      if (t % 2 == 0) {
        sync_threads();
      } else {
        sync_threads();
      }
      break;
    case kSyncOfWarpsAtTwoPlaces:
      if (t < 32) {
        sync_threads();
      } else {
        sync_threads();
      }
      break;
    case kRolesAtTwoPlaces:
      s[t] = in[t];
      if (t < 32) {
        sync_roles<64>();
      } else {
        sync_roles<64>();
      }
      out[t] = s[63 - t];
      break;
    case kWarpFunctionInOneBranch:
      if (t % 32 < 7) out[t] = shuffle(in[t], 0);
      break;
    case kTwoWarpFunctions: out[t] = t % 2 == 0 ? shuffle(in[t], 0) : shuffle_xor(in[t], 1); break;
    case kReturnBeforeSync:
      if (t >= 40) return;
      sync_threads();
      out[t] = 1.0F;
      break;
    case kProducerConsumer:
    case kProducerWithoutArrive:
      if (t < 32) {
        s[t] = in[t];
        if (what == kProducerConsumer) barrier_arrive(3, 64);
      } else {
        barrier_sync(3, 64);
        out[t] = s[63 - t];
      }
      break;
    case kBarrierCounts: barrier_sync(2, t < 32 ? 32 : 64); break;
    case kCopyWithoutWait:
      copy(0);
      out[t] = s[t];
      break;
    case kCopyWaitTooEarly:
      copy(0);
      cp_async_wait<1>();
      out[t] = s[t];
      break;
    case kCopyWithoutBarrier:
      copy(0);
      cp_async_wait<0>();
      out[t] = s[63 - t];
      break;
    case kCopyOverRead:
      s[t] = in[t];
      sync_threads();
      out[t] = s[63 - t];
      copy(1);
      cp_async_wait<0>();
      break;
    case kCopySecondStage:
      copy(0);
      cp_async_wait<0>();
      sync_threads();
      out[t] = s[63 - t];
      sync_threads();
      copy(1);
      cp_async_wait<0>();
      sync_threads();
      out[t] += s[63 - t];
      break;
    case kUnwritten: out[t] = s[t]; break;
    case kSharedIndex: s[t + 1] = in[t]; break;
    case kSharedArray: shared<float>(128, 64)[0] = 1.0F; break;
    case kSharedVector: s.store_vec<4>(2, Vec<float, 4>{}); break;
    case kGlobalIndex: out[t + 1] = in[t]; break;
    case kGlobalVector: store_global<4>(out + 1, load_global<4>(in)); break;
    case kDeepStack: {
      volatile int first = 0;
      out[t] = static_cast<float>(deep(&first, 1000));
      break;
    }
  }
}

class CudaMisuse : public CudaEmulator {
 protected:
  Status run(Misuse what) {
    return launch<misuse_kernel>({.name = "misuse", .grid = {1}, .threads = 64, .shared_bytes = 256}, {}, what,
                                 in_.data(), out_.data());
  }
  DeviceArray<float> in_{numbers()}, out_{64};

 private:
  static std::vector<float> numbers() {
    std::vector<float> v(128);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i) + 0.5F;
    return v;
  }
};

TEST_F(CudaMisuse, RightProgramsPass) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    emulator::options().shuffle = seed != 0;
    emulator::options().seed = seed;
    for (const Misuse ok :
         {kNone, kRolesAtTwoPlaces, kNeighbourWithSyncWarp, kReturnBeforeSync, kProducerConsumer, kCopySecondStage}) {
      EXPECT_EQ(error(run(ok)), "no error") << ok;
    }
  }
  ASSERT_TRUE(run(kNone).ok());
  const auto in = in_.get();
  auto out = out_.get();
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], in[63 - i]);
  ASSERT_TRUE(run(kCopySecondStage).ok());
  out = out_.get();
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], in[63 - i] + in[127 - i]);
}

TEST_F(CudaMisuse, Races) {
  for (const bool shuffle : {false, true}) {
    emulator::options().shuffle = shuffle;
    // Who comes first decides whether it is seen as a race or as a read of what nobody wrote.
    emulator::options().unwritten = false;
    EXPECT_FAULT(run(kReadWithoutBarrier), "no barrier between");
    EXPECT_FAULT(run(kWriteAfterRead), "no barrier between");
    EXPECT_FAULT(run(kWriteTwice), "wrote with no barrier between");
    EXPECT_FAULT(run(kNeighbourWithoutSyncWarp), "no barrier between");
    EXPECT_FAULT(run(kCopyOverRead), "no barrier between");
  }
  emulator::options().races = false;
  EXPECT_EQ(error(run(kWriteTwice)), "no error");
}

TEST_F(CudaMisuse, BarriersThatNeverOpen) {
  for (const bool shuffle : {false, true}) {
    emulator::options().shuffle = shuffle;
    EXPECT_FAULT(run(kSyncInOneBranch),
                 "deadlock: 32 threads (first 32) wait in barrier 1; 32 threads (first 0) wait in sync_threads");
    EXPECT_FAULT(run(kSyncAtTwoPlaces), "divergent sync_threads");
    EXPECT_FAULT(run(kSyncOfWarpsAtTwoPlaces), "divergent sync_threads");
    EXPECT_FAULT(run(kWarpFunctionInOneBranch), "deadlock: 14 threads (first 0) wait in shuffle; 50 have returned");
    EXPECT_FAULT(run(kTwoWarpFunctions), "divergent warp");
    EXPECT_FAULT(run(kProducerWithoutArrive), "deadlock: 32 threads (first 32) wait in barrier 3");
  }
  EXPECT_FAULT(run(kBarrierCounts), "barrier 2");
}

TEST_F(CudaMisuse, AsynchronousCopies) {
  EXPECT_FAULT(run(kCopyWithoutWait), "cp.async of thread 0 (warp 0, lane 0) is not waited for");
  EXPECT_FAULT(run(kCopyWaitTooEarly), "is not waited for");
  emulator::options().unwritten = false;
  EXPECT_FAULT(run(kCopyWithoutBarrier), "no barrier between");
  emulator::options().shuffle = true;
  EXPECT_FAULT(run(kCopyWithoutWait), "is not waited for");
}

TEST_F(CudaMisuse, Addresses) {
  EXPECT_FAULT(run(kUnwritten), "which nobody wrote");
  EXPECT_FAULT(run(kSharedIndex), "thread 63 (warp 1, lane 31): element 64 of a shared array of 64");
  EXPECT_FAULT(run(kSharedArray), "shared array of bytes 128 to 384 of 256");
  EXPECT_FAULT(run(kSharedVector), "no multiple of 16");
  EXPECT_FAULT(run(kGlobalIndex),
               "thread 63 (warp 1, lane 31): global memory access out of bounds: byte 256 of a buffer of 256");
  EXPECT_FAULT(run(kGlobalVector), "no multiple of 16");
}

TEST_F(CudaMisuse, StackOverflow) { EXPECT_FAULT(run(kDeepStack), "stack overflow"); }

TEST_F(CudaMisuse, TheNextLaunchIsSound) {
  EXPECT_FALSE(run(kSyncInOneBranch).ok());
  EXPECT_EQ(error(run(kNone)), "no error");
}

}  // namespace
}  // namespace fla::cuda
