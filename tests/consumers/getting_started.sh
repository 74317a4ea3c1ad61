#!/usr/bin/env bash
# The programs of docs/getting_started.md build, and print the same losses on one device, on one rank and on four.
set -euo pipefail
for name in plain mesh; do
  awk -v start="<!-- $name.cpp -->" '$0 == start {wanted = 1} wanted && /^```$/ {exit} code {print} wanted && /^```cpp$/ {code = 1}' \
    docs/getting_started.md >"$TMPDIR/$name.cpp"
done
library=$(dirname "$(find "$DTENSOR_PREFIX" -name libdtensor.so)")
export PKG_CONFIG_PATH=$library/pkgconfig LD_LIBRARY_PATH=$library
for name in plain mesh; do
  # shellcheck disable=SC2046
  g++ -std=c++20 "$TMPDIR/$name.cpp" -o "$TMPDIR/$name" $(pkg-config --cflags --libs dtensor)
done
"$TMPDIR/plain" | tee "$TMPDIR/expected"
grep -q '^epoch 4 loss' "$TMPDIR/expected"
"$TMPDIR/mesh" | diff "$TMPDIR/expected" -
"$TMPDIR/mesh" --ranks 4 | diff "$TMPDIR/expected" -
"$TMPDIR/mesh" --ranks 3 --transport gloo | diff "$TMPDIR/expected" -
[ ! -x "$DTENSOR_BUILD/tools/dtensor-run" ] || "$DTENSOR_BUILD/tools/dtensor-run" -n 4 "$TMPDIR/mesh" | diff "$TMPDIR/expected" -
# They differ in the marked lines only.
diff <(grep -v '// <-' "$TMPDIR/mesh.cpp" | grep -v '^ *$') \
  <(grep -v '^ *$' "$TMPDIR/plain.cpp" | grep -v 'int main()\|auto& batch\|total +=\|std::printf') | grep '^[<>]' && exit 1 || true
