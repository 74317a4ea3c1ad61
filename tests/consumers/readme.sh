#!/usr/bin/env bash
# The program in README.md builds, runs on four ranks, and learns.
set -euo pipefail
awk '/^```cpp$/ {code = 1; next} /^```$/ {code = 0} code' README.md >"$TMPDIR/program.cpp"
library=$(dirname "$(find "$DTENSOR_PREFIX" -name libdtensor.so)")
export PKG_CONFIG_PATH=$library/pkgconfig
# shellcheck disable=SC2046
g++ -std=c++20 "$TMPDIR/program.cpp" -o "$TMPDIR/program" $(pkg-config --cflags --libs dtensor)
LD_LIBRARY_PATH=$library "$TMPDIR/program" --ranks 4 | tee "$TMPDIR/losses"
awk 'NR == 1 {first = $2} {last = $2} END {exit !(NR == 100 && last > 0 && last < 0.75 * first)}' "$TMPDIR/losses"
