#!/usr/bin/env bash
# Installs build/release into a temporary prefix and uses it as a stranger would: tests/package through find_package
# (shared and static) and through pkg-config, and the installed program.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install build/release --prefix "$work/prefix" >/dev/null
want=$(sed -n 's/^project(fla VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)

check() {  # NAME CMAKE-ARGUMENTS...
  local name=$1 got
  shift
  cmake -S tests/package -B "$work/$name" -G Ninja "$@" >"$work/$name.log" 2>&1 &&
    cmake --build "$work/$name" >>"$work/$name.log" 2>&1 || { cat "$work/$name.log" >&2; echo "package-test: $name failed" >&2; exit 1; }
  got=$("$work/$name/use_fla") || { echo "package-test: $name: use_fla failed" >&2; exit 1; }
  [[ $got == "$want"* ]] || { echo "package-test: $name: expected $want, got '$got'" >&2; exit 1; }
  echo "package-test: $name: $got"
}
check find_package -D CMAKE_PREFIX_PATH="$work/prefix"
check find_package_static -D CMAKE_PREFIX_PATH="$work/prefix" -D USE_STATIC=ON
pc=$(find "$work/prefix" -name fla.pc -printf '%h')
PKG_CONFIG_PATH=$pc check pkg_config -D USE_PKG_CONFIG=ON

# The installed tree must not need the place it was built in.
soname=$(readelf -d "$(find "$work/prefix" -name libfla.so)" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
[[ $soname == "libfla.so.${want%.*}" || $soname == "libfla.so.${want%%.*}" ]] || { echo "package-test: SONAME: got $soname" >&2; exit 1; }
program=$work/prefix/bin/fla
[[ $("$program" --version) == *"$want"* ]] || { echo "package-test: $program --version does not name $want" >&2; exit 1; }
echo "package-test: $soname, $("$program" --version | head -n 1)"
