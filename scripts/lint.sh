#!/usr/bin/env bash
# scripts/lint.sh [--changed [REF]]: cppcheck and clang-tidy over fla/ and tools/, clang over the CUDA kernels as C++, or
# over the files that differ from REF (default HEAD).
set -euo pipefail
cd "$(dirname "$0")/.."
# A configuration of its own: clang cannot read another compiler's precompiled headers.
db=build/lint/compile_commands.json
cmake --preset release -B build/lint -Wno-dev -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null

list() {
  if [[ ${1:-} == --changed ]]; then
    git diff --name-only --diff-filter=d "${2:-HEAD}" &&
      git ls-files --others --exclude-standard
  else
    git ls-files --cached --others --exclude-standard
  fi
}
sources=$(list "$@")

# No index, size or stride of a kernel is cut to 32 bits without a cast; simt.cuh's BlockIndex makes products of 64 bits.
if grep -qE '^fla/.*\.(cu|cuh)$' <<<"$sources"; then
  kernels=()
  while read -r f; do kernels+=("$f"); done < <(find fla/engine fla/ops build/lint/generated -name '*.cu' | sort)
  echo "lint: ${#kernels[@]} sources of kernels"
  printf '%s\0' "${kernels[@]}" |
    xargs -0 -n 1 -P "$(nproc)" clang++ -x c++ -std=c++20 -fsyntax-only -I. -DFLA_CUDA_EMULATE \
      -Werror=shorten-64-to-32 -Wno-unknown-pragmas
fi

files=()
while read -r f; do
  [[ -e $f && $f != *_test.cc ]] && grep -qF "/$f\"" "$db" && files+=("$f")
done < <(grep -E '^(fla|tools)/.*\.cc$' <<<"$sources" | sort -u)
if ((${#files[@]} == 0)); then
  echo "lint: no source to check"
  [[ ${1:-} == --changed ]] && exit 0
  exit 4
fi
echo "lint: ${#files[@]} sources"

# Highway's macros mean nothing to cppcheck. Chained calls that return *this, and members named like a moved parameter,
# mislead two of its checks; clang-tidy's bugprone-use-after-move and the compilers' -Wreturn-local-addr do that work.
cppcheck -q --std=c++20 --language=c++ --enable=warning,portability,performance --inline-suppr --error-exitcode=1 \
  -j "$(nproc)" -I . --suppress=missingInclude --suppress=missingIncludeSystem --suppress=unmatchedSuppression \
  --suppress=preprocessorErrorDirective --suppress=returnTempReference --suppress=accessMoved \
  '-DHWY_BEFORE_NAMESPACE()=' '-DHWY_AFTER_NAMESPACE()=' -DHWY_ATTR= -DHWY_API=static -DHWY_INLINE=inline \
  -DHWY_NOINLINE= -DHWY_RESTRICT= -DHWY_NAMESPACE=N_CPPCHECK '-DHWY_EXPORT(x)=' '-DHWY_ONCE=1' "${files[@]}"
# One of the instruction sets that a kernel is compiled for says it all.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy -p build/lint --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-DHWY_COMPILE_ONLY_STATIC \
    2> >(grep -vE 'warnings? generated|^Suppressed|^Use -header-filter' >&2 || true)
