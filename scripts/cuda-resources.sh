#!/usr/bin/env bash
# scripts/cuda-resources.sh [--arch 90a] [FILE.cu...]: what each CUDA kernel takes, as a Markdown table; without files, of
# every .cu of the operators. Shared memory is the static part: the dynamic part is chosen at the launch.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=90a
if [[ ${1:-} == --arch ]]; then
  arch=${2:?"--arch needs a value such as 90a"}
  shift 2
fi
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[[ -x $nvcc ]] || { echo "cuda-resources: nvcc was not found" >&2; exit 2; }
if (($# == 0)); then
  mapfile -t files < <(git ls-files --cached --others --exclude-standard -- 'fla/ops/*.cu')
else
  files=("$@")
fi
((${#files[@]} > 0)) || { echo "cuda-resources: there is no .cu file" >&2; exit 4; }
object=$(mktemp)
trap 'rm -f "$object"' EXIT

echo "| file | kernel (sm_$arch) | registers | barriers | static shared | stack | spill stores | spill loads |"
echo "|---|---|---|---|---|---|---|---|"
for f in "${files[@]}"; do
  "$nvcc" -std=c++20 -O3 -DNDEBUG -gencode "arch=compute_$arch,code=sm_$arch" -Xptxas -v -I. -c "$f" -o "$object" 2>&1 |
    awk -v file="$f" '
      /Compiling entry function/ { split($0, q, "\x27"); name = q[2] }
      /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
      /Used [0-9]+ registers/ {
        registers = barriers = shared = 0
        for (i = 1; i < NF; ++i) {
          if ($(i + 1) ~ /^registers/) registers = $i
          if ($(i + 1) ~ /^barriers/) barriers = $i
          if ($(i + 2) ~ /^smem/) shared = $i
        }
        print "| " file " | " name " | " registers " | " barriers " | " shared " | " stack " | " stores " | " loads " |"
      }
      /error|warning/ { print > "/dev/stderr"; bad = 1 }
      END { exit bad }' | c++filt -p | sed 's/(anonymous namespace):://g; s/fla::cuda:://g; s/fla:://g'
done
