#!/usr/bin/env bash
# A Meson project that has the library as a subproject builds it and runs. The folder is kept: the next run is quick.
set -euo pipefail
work=$DTENSOR_BUILD/consumer-meson
mkdir -p "$work/subprojects"
cp tests/consumers/program.cpp tests/consumers/meson/meson.build "$work"
ln -sfn "$PWD" "$work/subprojects/dtensor"
options=(--buildtype=plain --optimization=0 "$work" "$work/build")
[ ! -e "$work/build/build.ninja" ] || options+=(--reconfigure)
meson setup "${options[@]}"
ninja -C "$work/build" -j 2
"$work/build/program"
