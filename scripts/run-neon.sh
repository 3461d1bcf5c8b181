#!/usr/bin/env bash
# Runs the Arm build of the tests under qemu-user: the unit tests, and one part in NEON_SHARDS of the gate (emulation is
# slow). Left out is what the emulator cannot do: fork a process with threads, map far strides without committing memory,
# calls of many seconds.
# Tells whether results are right on NEON, never how fast.
set -euo pipefail
cd "$(dirname "$0")/.."
qemu=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
scripts/run-gtest.sh "${qemu[@]}" build/neon/bin/fla_core_test --gtest_filter="${NEON_CORE_FILTER:--*Fork*}"
export GTEST_TOTAL_SHARDS=${NEON_SHARDS:-32} GTEST_SHARD_INDEX=${NEON_SHARD:-0}
scripts/run-gtest.sh "${qemu[@]}" build/neon/bin/fla_gate --gtest_filter="${NEON_GATE_FILTER:--*FarStrides*:*Fork*:*LargeGradients*}"
