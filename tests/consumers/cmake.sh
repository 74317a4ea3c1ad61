#!/usr/bin/env bash
# A CMake project that finds the installed library with find_package builds and runs.
set -euo pipefail
command -v cmake >/dev/null || { echo "cmake is not installed"; exit 77; }
cp tests/consumers/program.cpp tests/consumers/cmake/CMakeLists.txt "$TMPDIR"
cmake -S "$TMPDIR" -B "$TMPDIR/build" -DCMAKE_PREFIX_PATH="$DTENSOR_PREFIX"
cmake --build "$TMPDIR/build"
"$TMPDIR/build/program"
