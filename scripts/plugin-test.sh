#!/usr/bin/env bash
# Builds examples/plugin as a stranger would, from the installed headers alone, and proves it with the program of the build
# in the folder given (build/release).
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build/release}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/prefix" --component headers >/dev/null
cmake -S examples/plugin -B "$work/plugin" -D CMAKE_PREFIX_PATH="$work/prefix" >"$work/log" 2>&1 &&
  cmake --build "$work/plugin" >>"$work/log" 2>&1 || { cat "$work/log" >&2; echo "plugin-test: the example does not build" >&2; exit 1; }
"$build/bin/fla" gate chunk_simple_gla --plugin "$work/plugin/simple_gla.so"
"$build/bin/fla" check tests/golden/simple_gla --function chunk_simple_gla --plugin "$work/plugin/simple_gla.so"
