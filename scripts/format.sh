#!/usr/bin/env bash
# scripts/format.sh [--check]: formats every C++ and CUDA source, or only tells which differ.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=(-i)
[[ ${1:-} == --check ]] && mode=(--dry-run -Werror)
git ls-files --cached --others --exclude-standard -- '*.h' '*.hpp' '*.cc' '*.cu' '*.cuh' | sort -u |
  while read -r f; do [[ -e $f ]] && printf '%s\0' "$f"; done |
  xargs -0 -r -n 8 -P "$(nproc)" clang-format --style=file "${mode[@]}"
