#!/usr/bin/env bash
# The example of a custom operator: same results as one device on several meshes, and the plan that it prints.
set -euo pipefail
for ranks in 1 2 3 4; do
  "$DTENSOR_BUILD/examples/custom_op" --ranks $ranks >"$TMPDIR/out"
  grep -q "loss and gradient are those of one device" "$TMPDIR/out"
done
grep -q '\* S(0), R, R -> S(0)' "$TMPDIR/out"
