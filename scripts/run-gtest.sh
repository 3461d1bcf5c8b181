#!/usr/bin/env bash
# scripts/run-gtest.sh COMMAND...: runs a GoogleTest program and fails when it selected no test or skipped them all.
set -uo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$@" --gtest_brief=0 2>&1 | tee "$log" | grep -vE '^\[ +(RUN|OK) '
rc=${PIPESTATUS[0]}
((rc == 0)) || exit "$rc"
passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\?.*/\1/p' "$log" | tail -n 1)
((${passed:-0} > 0)) || { echo "run-gtest: no test passed: nothing was selected, or all were skipped: $*" >&2; exit 4; }
