#!/usr/bin/env bash
# Unpacks the Arm builds of our libraries into build/neon-sysroot. apt runs on lists and a cache of its own there, so
# neither the machine's architectures nor its packages change.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/neon-sysroot
[[ -e $root/complete ]] && exit 0
command -v apt-get >/dev/null || { echo "neon-sysroot: needs apt-get to fetch Arm packages; unpack them into $root and create $root/complete" >&2; exit 2; }

rm -rf "$root"
apt=$root/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs"
options=(-qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=
  -o Dir::State::lists="$apt/lists" -o Dir::State::status=/dev/null -o Dir::Cache="$apt/cache")
apt-get "${options[@]}" update
(cd "$apt/debs" && apt-get "${options[@]}" download \
  libhwy1 libhwy-dev libgtest-dev libgmock-dev librapidcheck-dev libfmt9 libfmt-dev libdlpack-dev libcli11-dev nlohmann-json3-dev)
for deb in "$apt"/debs/*.deb; do dpkg -x "$deb" "$root"; done
rm -rf "$apt"
touch "$root/complete"
