#!/usr/bin/env bash
# Which part of a test program's tests a sanitizer's build runs: one of four, drawn by the commit, so that each commit
# brings another one and the same commit always the same. ASAN_ALL=1 runs them all.
#   scripts/sanitizer-part.sh                      says which part it is
#   scripts/sanitizer-part.sh I N PROGRAM [ARG...] runs share I of N (from 1) of that part
set -euo pipefail
parts=4
root=$(cd "$(dirname "$0")/.." && pwd)
commit=$(git -C "$root" rev-parse --verify --quiet HEAD 2>/dev/null || echo 00000000)
part=$((16#${commit:0:8} % parts))
if [[ ${ASAN_ALL:-0} != 0 ]]; then
  parts=1 part=0
  text="all tests (ASAN_ALL)"
else
  text="part $((part + 1)) of $parts, by commit ${commit:0:12}; ASAN_ALL=1 runs all parts"
fi
echo "sanitizer: $text"
(($# > 0)) || exit 0
share=$1 shares=$2
shift 2
export GTEST_TOTAL_SHARDS=$((parts * shares)) GTEST_SHARD_INDEX=$((part * shares + share - 1))
exec "$@"
