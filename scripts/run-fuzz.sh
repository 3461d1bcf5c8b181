#!/usr/bin/env bash
# scripts/run-fuzz.sh SECONDS: each fuzz target for that long, from its seed corpus and what earlier runs found.
set -euo pipefail
cd "$(dirname "$0")/.."
shopt -s nullglob
seconds=${1:?usage: scripts/run-fuzz.sh SECONDS}
targets=(build/fuzz/bin/fuzz_*)
((${#targets[@]})) || { echo "run-fuzz: build/fuzz/bin has no fuzz target" >&2; exit 4; }
for target in "${targets[@]}"; do
  name=${target##*/fuzz_}
  found=build/fuzz/corpus/$name
  mkdir -p "$found" build/fuzz/crashes
  seeds=()
  [[ -d tests/fuzz/corpus/$name ]] && seeds=("tests/fuzz/corpus/$name")
  echo "fuzz $name: $seconds s"
  log=build/fuzz/$name.log
  "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -artifact_prefix=build/fuzz/crashes/ \
    -print_final_stats=1 "$found" ${seeds[@]+"${seeds[@]}"} >"$log" 2>&1 || { tail -n 60 "$log" >&2; exit 1; }
  grep -E 'number_of_executed_units|new_units_added' "$log"
done
