#!/usr/bin/env bash
# Looks for what must not be in the tree: constructs that break promises about results, and traces of one machine.
# One letter of each pattern stands in brackets so that this file does not match itself.
set -euo pipefail
cd "$(dirname "$0")/.."
code=('*.h' '*.hpp' '*.cc' '*.cu' '*.cuh' '*.cmake' 'CMakeLists.txt' '*/CMakeLists.txt' 'CMakePresets.json' 'Makefile')
bad=0
ban() {  # WHY REGEX [PATHS...]
  local why=$1 regex=$2
  shift 2
  if git grep --untracked -nIE -e "$regex" -- "$@" >&2; then
    echo "check-banned: $why" >&2
    bad=1
  fi
}
ban 'fast-math flags: results must not depend on what the optimiser may assume' \
  '(-|")(f?-?Ofas[t]|ffast-mat[h]|funsafe-math-optimization[s]|fassociative-mat[h]|ffinite-math-onl[y]|-use_fast_mat[h])|use_fast_mat[h]|pragma +(GCC|clang) +(optimiz[e]|fp +reassociat[e])' "${code[@]}"
ban 'float atomics: the order of sums would be chance' \
  'atomic(_ref)?<(float|double|bf16|f1[6])>|omp +atomi[c]|atomicAdd[ ]*\(|red\.(global|shared)?[a-z.]*add\.(noftz\.)?(f|bf)[136]' "${code[@]}"
# Test programs link their objects directly, so there the reason does not hold.
ban 'registering globals: a static library drops them; name the function in REGISTER of fla_family' \
  '__attribute__ *\(\((constructo[r])|^(static |inline |const |\[\[maybe_unused\]\] )*(bool|int|auto|Registra[r]|Registere[r]) +k?[A-Za-z_]*[rR]egister(ed|er|_)?[A-Za-z_]* *[={]|^REGISTE[R]_[A-Z_]+ *\(' 'fla/*' 'tools/*'
ban 'banners: say it in words or not at all' '^[ /*#]*(//|/\*|#)[ ]*[-=*#~]{6,}' "${code[@]}" '*.sh'
ban 'a path of one machine' '(^|[^A-Za-z0-9_.-])/(wor[k]|home/[a-z]+|User[s])/' .
exit "$bad"
