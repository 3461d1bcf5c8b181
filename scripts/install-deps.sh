#!/usr/bin/env bash
# Installs what a job needs and the machine lacks: scripts/install-deps.sh GROUP...   (build test lint fuzz neon)
# Looks for the headers and tools themselves, so a library that came another way counts, and says nothing when all is
# there. NO_INSTALL=1 installs nothing: it names what is missing and fails with 2.
set -u

# group | what is looked for (header:, tool:, lib:) | Debian package | why
needs='
build|tool:cmake|cmake|configures the build (3.25 or newer)
build|tool:ninja|ninja-build|runs the build
build|tool:g++|g++|compiles C++20
build|tool:pkg-config|pkg-config|finds libraries that have no CMake package
build|header:hwy/highway.h|libhwy-dev|Highway: vector code that picks the instruction set at run time
build|header:dlpack/dlpack.h|libdlpack-dev|DLPack: exchange of tensors
build|header:CLI/CLI.hpp|libcli11-dev|command line of the program
build|header:fmt/format.h|libfmt-dev|text of the program
build|header:nlohmann/json.hpp|nlohmann-json3-dev|JSON of the program
test|header:gtest/gtest.h|libgtest-dev|GoogleTest: tests and the gate
test|header:rapidcheck.h|librapidcheck-dev|tests on random input
test|tool:git|git|tells which files a check looks at
lint|tool:git|git|tells which files a check looks at
lint|tool:clang-format|clang-format|formatter
lint|tool:clang-tidy|clang-tidy|static checks
lint|tool:cppcheck|cppcheck|static checks
fuzz|tool:clang++|clang|compiler with libFuzzer
fuzz|clang-rt:|libclang-rt-14-dev|run-time part of libFuzzer and the sanitizers
neon|tool:aarch64-linux-gnu-g++|g++-aarch64-linux-gnu|compiles for 64-bit Arm
neon|tool:qemu-aarch64|qemu-user|runs Arm programs here
neon|tool:dpkg|dpkg|unpacks the Arm libraries
'

IFS=: read -ra roots <<<"/usr/include:/usr/local/include:${CPATH:-}:${CPLUS_INCLUDE_PATH:-}"
IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
for p in ${prefixes[@]+"${prefixes[@]}"}; do roots+=("$p/include"); done

present() {
  local what=${1#*:}
  case $1 in
    tool:*) command -v "$what" >/dev/null 2>&1 ;;
    header:*)
      local r
      for r in "${roots[@]}"; do [[ -n $r && -e $r/$what ]] && return 0; done
      return 1
      ;;
    clang-rt:*) compgen -G "$(clang++ -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer*" >/dev/null ;;
  esac
}

look() {  # fills packages[] and report[] for the groups asked for
  packages=() report=()
  local group what package why
  while IFS='|' read -r group what package why; do
    [[ -n $group && " $groups " == *" $group "* ]] || continue
    [[ " ${packages[*]-} " == *" $package "* ]] && continue
    present "$what" && continue
    packages+=("$package")
    report+=("$(printf '  %-22s %s' "$package" "$why")")
  done <<<"$needs"
}

groups="$*"
for g in "$@"; do
  [[ " build test lint fuzz neon " == *" $g "* ]] || { echo "install-deps: group: expected build, test, lint, fuzz or neon, got '$g'" >&2; exit 2; }
done
[[ -n $groups ]] || { echo "usage: scripts/install-deps.sh GROUP...  (build test lint fuzz neon)" >&2; exit 2; }

look
if ((${#packages[@]})); then
  sudo=()
  ((EUID == 0)) || sudo=(sudo)
  command="${sudo[*]:+${sudo[*]} }apt-get install -y --no-install-recommends ${packages[*]}"
  {
    echo "Missing for: $groups"
    printf '%s\n' "${report[@]}"
  } >&2
  if [[ -n ${NO_INSTALL:-} && ${NO_INSTALL} != 0 ]]; then
    printf 'NO_INSTALL is set, so nothing was installed. To install:\n  %s\n' "$command" >&2
    exit 2
  fi
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "This machine has no apt-get. Install the above with its own package manager (the names are Debian's) and run again." >&2
    exit 2
  fi
  if ((EUID != 0)) && ! command -v sudo >/dev/null 2>&1; then
    printf 'Not root, and there is no sudo. As root, run:\n  %s\n' "apt-get install -y --no-install-recommends ${packages[*]}" >&2
    exit 2
  fi
  echo "Installing: $command" >&2
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  apt() { "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q "$@" </dev/null >"$log" 2>&1 || { cat "$log" >&2; return 1; }; }
  apt update || echo "apt-get update failed; trying with the lists at hand." >&2
  apt install -y --no-install-recommends "${packages[@]}" || { echo "apt-get could not install: ${packages[*]}" >&2; exit 1; }
  hash -r
  look
  if ((${#packages[@]})); then
    echo "Installed, but still not found:" >&2
    printf '%s\n' "${report[@]}" >&2
    exit 1
  fi
fi

if [[ " $groups " == *" build "* ]]; then
  have=$(cmake --version | sed -n '1s/[^0-9]*//p')
  if [[ $(printf '%s\n' 3.25 "$have" | sort -V | head -n 1) != 3.25 ]]; then
    echo "cmake: needs 3.25 or newer, got $have ($(command -v cmake))" >&2
    exit 2
  fi
fi
