#!/usr/bin/env bash
# Random moves between random meshes, and that the tool takes only what it knows.
set -euo pipefail
moves=$DTENSOR_BUILD/tools/moves
[ -x "$moves" ] || { echo "the tool is not built: it needs CLI11"; exit 77; }

"$moves" --pairs 300 --ranks 3 >"$TMPDIR/said"
grep -q "^300 pairs of layouts on 3 ranks (threads)" "$TMPDIR/said"
"$moves" --pairs 50 --ranks 2 --transport gloo --seed 7 >"$TMPDIR/said"
grep -q "values, gradients and bytes as they should be" "$TMPDIR/said"
for option in --pairs=0 --ranks=0 --transport=pigeon --pigeon; do
  ! "$moves" "$option" >/dev/null 2>&1 || { echo "$option was taken"; exit 1; }
done
