#!/usr/bin/env bash
# A Meson project that has the library as a subproject: tests/consumers/meson.sh [--whole]
#
# It configures, its program compiles against the subproject, one file of the library compiles there, and the subproject has the files that
# this build has. --whole builds all of it once more and runs the program, which takes as long as a first build
# (DTENSOR_BUILD=build tests/consumers/meson.sh --whole).
set -euo pipefail
work=$DTENSOR_BUILD/consumer-meson
mkdir -p "$work/subprojects"
cp tests/consumers/program.cpp tests/consumers/meson/meson.build "$work"
ln -sfn "$PWD" "$work/subprojects/dtensor"
options=(--buildtype=plain --optimization=0 "$work" "$work/build")
[ ! -e "$work/build/build.ninja" ] || options+=(--reconfigure)
meson setup "${options[@]}"

if [ "${1:-}" = --whole ]; then
  ninja -C "$work/build" -j 2
  exec "$work/build/program"
fi

library_objects() { ninja -C "$1" -t targets all | sed -n 's|^.*libdtensor\.so\.p/\(.*\.o\): .*|\1|p' | LC_ALL=C sort; }
diff <(library_objects "$DTENSOR_BUILD") <(library_objects "$work/build") || { echo "the subproject has other files"; exit 1; }
library_objects "$work/build" | grep -x src_mesh_layout.cpp.o
ninja -C "$work/build" -j 2 program.p/program.cpp.o subprojects/dtensor/libdtensor.so.p/src_mesh_layout.cpp.o
