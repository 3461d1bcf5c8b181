#!/usr/bin/env bash
# Runs the threaded tests of build/tsan under the thread sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=build/tsan/bin
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 die_after_fork=0"

# Where the kernel randomises addresses more than the sanitizer's fixed layout allows, it runs without randomisation.
plain=()
if ! "$bin/fla_core_test" --gtest_list_tests >/dev/null 2>&1; then
  plain=(setarch "$(uname -m)" -R)
fi
scripts/run-gtest.sh ${plain[@]+"${plain[@]}"} "$bin/fla_core_test" --gtest_filter='*Thread*:*Pool*:*Context*:*Fork*'
scripts/run-gtest.sh ${plain[@]+"${plain[@]}"} "$bin/fla_gate" --gtest_filter='*Thread*:*Rerun*:*Concurrent*'
