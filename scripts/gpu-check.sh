#!/usr/bin/env bash
# scripts/gpu-check.sh [-b DIR] [-o FILE] [-q]: proves and times the CUDA backend on this machine's GPU and leaves one
# report. DIR holds fla and fla_gate (default build/cuda/bin), FILE is the report (default gpu-report.md); -q leaves out
# the sanitizers and the long shapes. $FLA_GOLDEN is the folder of the recorded cases (default tests/golden). Exit status:
# 0 all is right, 1 something is not, 2 there is no GPU that can be used.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=build/cuda/bin report=gpu-report.md quick=0
while getopts b:o:q option; do
  case $option in
    b) bin=$OPTARG ;;
    o) report=$OPTARG ;;
    q) quick=1 ;;
    *) exit 2 ;;
  esac
done
golden=${FLA_GOLDEN:-tests/golden}
families=(linear_attn retention lightning_attn simple_gla gla delta_rule gated_delta_rule kda)
shapes=B1_T8192_H96_D128,B2_T16384_H16_D128,B4_T4096_H64_D128,B4_T2048_H16_D128,B8_T1024_H8_D64
((quick)) && shapes=B4_T2048_H16_D128,B8_T1024_H8_D64
bad=()

say() { printf '%s\n' "$@" >>"$report"; }
# step TITLE COMMAND...: the last lines of what it printed, its exit status and its time go into the report.
step() {
  local title=$1 log rc begin=$SECONDS
  shift
  log=$(mktemp)
  echo "gpu-check: $title" >&2
  "$@" >"$log" 2>&1
  rc=$?
  ((rc == 0)) || bad+=("$title (status $rc)")
  say "" "## $title" "" "Status $rc, $((SECONDS - begin)) s: \`$*\`" "" '```'
  tail -n 60 "$log" >>"$report"
  say '```'
  rm -f "$log"
}

"$bin/fla" doctor >/dev/null || exit 2
if ! why=$("$bin/fla" explain chunk_gla --shape T=64,H=1,D=64 --device cuda 2>&1) && [[ $why != *"diag"* ]]; then
  echo "gpu-check: no GPU that can be used: $why" >&2
  exit 2
fi
printf '# GPU report, %s\n' "$(date -u +%Y-%m-%dT%H:%MZ)" >"$report"
step "Machine" "$bin/fla" doctor
for type in f32 bf16 f16; do
  for family in "${families[@]}"; do
    [[ -d $golden/$family ]] && step "Recorded cases, $family, $type" "$bin/fla" check "$golden/$family" --device cuda --dtype "$type"
  done
done
step "Gate" "$bin/fla" gate "${families[@]}" --device cuda
if ((!quick)); then
  # 50 runs of what must not change by a bit, four processes at once.
  rerun() {
    local pids=() rc=0
    for _ in 1 2 3 4; do
      "$bin/fla_gate" --device=cuda --gtest_filter='*/Reruns' --gtest_repeat=13 --gtest_brief=1 >/dev/null &
      pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || rc=1; done
    return $rc
  }
  step "Reruns under load" rerun
  if sanitizer=$(command -v compute-sanitizer); then
    for tool in memcheck racecheck initcheck synccheck; do
      step "compute-sanitizer $tool" "$sanitizer" --tool "$tool" --error-exitcode 1 "$bin/fla_gate" --device=cuda \
        --gtest_filter='*chunk_gla/Shapes:*chunk_simple_gla/Shapes:*gla_step/Shapes:*gla/Packed'
    done
  else
    say "" "## compute-sanitizer" "" "Not run: it is not installed here."
  fi
fi
for family in retention simple_gla gla; do
  step "Benchmark, chunk_$family" "$bin/fla" bench "chunk_$family" --device cuda --dtype bf16 --shapes "$shapes"
done
step "Benchmark, decode" "$bin/fla" bench gla_step simple_gla_step --device cuda --dtype bf16 --modes fwd \
  --custom-shapes '{"decode_B256_H64": {"B": 256, "T": 1, "H": 64, "D": 128}}'

say "" "## Verdict" ""
if ((${#bad[@]} > 0)); then
  say "Not right:" "${bad[@]/#/- }"
  printf 'gpu-check: not right: %s\n' "${bad[@]}" >&2
  exit 1
fi
say "All is right."
