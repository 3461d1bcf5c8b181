#!/usr/bin/env bash
# scripts/gpu-check.sh [-b DIR] [-o FILE] [-q] [-n] [-s SECONDS]: proves and times the CUDA backend on this machine's GPU
# and leaves one report. DIR holds what `make cuda` builds (default build/cuda/bin), FILE is the report (default
# gpu-report.md); -q leaves out the sanitizers, the reruns under load, large tensors and long shapes, -n all benchmarks; a
# sanitizer may take SECONDS for a family (default 600), after which it counts as not right. $FLA_CPP_GOLDEN is the folder
# of the recorded cases (default tests/golden). Exit status: 0 all is right, 1 something is not, 2 there is no GPU that can
# be used.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
bin=build/cuda/bin report=gpu-report.md quick=0 bench=1 limit=600
usage() {
  echo "gpu-check: $1; usage: scripts/gpu-check.sh [-b DIR] [-o FILE] [-q] [-n] [-s SECONDS]" >&2
  exit 2
}
while getopts :b:o:qns: option; do
  case $option in
    b) bin=$OPTARG ;;
    o) report=$OPTARG ;;
    q) quick=1 ;;
    n) bench=0 ;;
    s) limit=$OPTARG ;;
    :) usage "-$OPTARG: expected a value" ;;
    *) usage "-$OPTARG: there is no such option" ;;
  esac
done
shift $((OPTIND - 1))
(($# == 0)) || usage "expected options only, got '$1'"
[[ $limit =~ ^[1-9][0-9]*$ ]] || usage "-s: expected seconds, got '$limit'"
golden=${FLA_CPP_GOLDEN:-tests/golden}
families=(linear_attn retention lightning_attn simple_gla gla delta_rule gated_delta_rule kda)
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
  told "$title" $rc $((SECONDS - begin)) "$*" "$log"
  rm -f "$log"
}
# told TITLE STATUS SECONDS COMMAND LOG
told() {
  (($2 == 0)) || bad+=("$1 (status $2)")
  say "" "## $1" "" "Status $2, $3 s: \`$4\`" "" '```'
  tail -n 240 "$5" >>"$report"
  say '```'
}
# for_families COMMAND...: once for each family that has recorded cases, side by side; {} stands for their folder. The
# last two lines of each, and before them the first ones of what failed.
for_families() {
  local logs rc=0 f
  logs=$(mktemp -d)
  for f in "${families[@]}"; do
    [[ -d $golden/$f ]] || continue
    ("${@//\{\}/$golden/$f}" >"$logs/$f" 2>&1; echo $? >"$logs/$f.rc") &
  done
  wait
  for f in "${families[@]}"; do
    if [[ ! -e $logs/$f ]]; then
      echo "$f: no recorded cases in $golden"
      continue
    fi
    echo "$f: status $(<"$logs/$f.rc")"
    if [[ $(<"$logs/$f.rc") != 0 ]]; then  # none is not 0 either
      rc=1
      grep -v 'Host Frame' "$logs/$f" | head -n 24
    fi
    tail -n 2 "$logs/$f"
  done
  rm -rf "$logs"
  return $rc
}
# 52 runs of what must not change by a bit, four processes at once.
rerun() {
  local pids=() rc=0 pid
  for _ in 1 2 3 4; do
    "$bin/fla_gate" --device=cuda --gtest_filter='*/Reruns' --gtest_repeat=13 --gtest_brief=1 >/dev/null &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || rc=1; done
  return $rc
}

if [[ ! -x $bin/fla || ! -x $bin/fla_gate || ! -x $bin/fla_cuda_test ]]; then
  echo "gpu-check: $bin: expected fla, fla_gate and fla_cuda_test there: build them with make cuda, or name the folder with -b" >&2
  exit 2
fi
for f in "${families[@]}"; do [[ -d $golden/$f ]] && found=1; done
((${found:-0})) || usage "\$FLA_CPP_GOLDEN: no recorded cases in $golden"
: >"$report" || usage "-o: cannot write $report"
"$bin/fla" doctor >/dev/null || exit 2
if ! why=$("$bin/fla" explain chunk_gla --shape T=64,H=1,D=64 --device cuda 2>&1) && [[ $why != *"diag"* ]]; then
  echo "gpu-check: no GPU that can be used: $why" >&2
  exit 2
fi
printf '# GPU report, %s\n' "$(date -u +%Y-%m-%dT%H:%MZ)" >"$report"
step "Machine" "$bin/fla" doctor
step "Tests of the kernels" "$bin/fla_cuda_test" --gtest_brief=1
for type in f32 bf16 f16; do
  step "Recorded cases, $type" for_families "$bin/fla" check {} --device cuda --dtype "$type"
done
step "Gate" "$bin/fla" gate "${families[@]}" --device cuda
if ((!quick)); then
  step "Tensors beyond 2^31 elements" "$bin/fla_cuda_large"
  step "Reruns under load" rerun
  if sanitizer=$(command -v compute-sanitizer); then
    logs=$(mktemp -d) tools=(memcheck initcheck synccheck racecheck) begin=$SECONDS
    echo "gpu-check: compute-sanitizer, ${tools[*]} side by side" >&2
    for tool in "${tools[@]}"; do
      (for_families timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 1 \
        "$bin/fla" check {} --device cuda --dtype bf16 >"$logs/$tool"; echo $? >"$logs/$tool.rc") &
    done
    wait
    for tool in "${tools[@]}"; do
      told "compute-sanitizer $tool" "$(<"$logs/$tool.rc")" $((SECONDS - begin)) \
        "compute-sanitizer --tool $tool fla check DIR --device cuda --dtype bf16, four tools side by side" "$logs/$tool"
    done
    rm -rf "$logs"
  else
    say "" "## compute-sanitizer" "" "Not run: it is not installed here."
  fi
fi
if ((bench)); then
  small='B4_T2048_H16_D128,B8_T1024_H8_D64'
  for operator in chunk_linear_attn chunk_simple_gla chunk_gla chunk_gdn chunk_kda; do
    step "Benchmark, $operator" "$bin/fla" bench "$operator" --device cuda --dtype bf16 --shapes "$small"
  done
  if ((!quick)); then
    step "Benchmark, diagonal decay" "$bin/fla_cuda_diag_bench"
    step "Benchmark, delta rule" "$bin/fla_cuda_delta_bench"
  fi
  step "Benchmark, decode" "$bin/fla" bench gla_step gdn_step kda_step --device cuda --dtype bf16 --modes fwd \
    --custom-shapes '{"B256_T1_H64_D128": {"B": 256, "T": 1, "H": 64, "D": 128}}'
fi

say "" "## Verdict" ""
if ((${#bad[@]} > 0)); then
  say "Not right:" "${bad[@]/#/- }"
  printf 'gpu-check: not right: %s\n' "${bad[@]}" >&2
  exit 1
fi
say "All is right."
