#!/usr/bin/env bash
# A program that finds the installed library with pkg-config builds and runs.
set -euo pipefail
library=$(dirname "$(find "$DTENSOR_PREFIX" -name libdtensor.so)")
export PKG_CONFIG_PATH=$library/pkgconfig
# shellcheck disable=SC2046
g++ -std=c++20 $(pkg-config --cflags dtensor) tests/consumers/program.cpp -o "$TMPDIR/program" $(pkg-config --libs dtensor)
LD_LIBRARY_PATH=$library "$TMPDIR/program"
