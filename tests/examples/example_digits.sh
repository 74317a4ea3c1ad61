#!/usr/bin/env bash
# The convolutional network with a data loader of two workers, augmentation and dropout trains on a mesh as on one device: the same bits on one
# rank, the same losses but for rounding on more, the same bits on threads and processes. At most 16 lines are new in the program.
set -euo pipefail
export OMP_NUM_THREADS=1
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/examples
program=$DTENSOR_BUILD/examples/digits_mesh
cd "$TMPDIR"  # for digits.pt

# compare TOLERANCE: the losses of one device and of the mesh.
compare() {
  paste <(grep ^step "$TMPDIR/one") <(grep ^step "$TMPDIR/mesh") | awk -v tolerance="$1" -v ranks=$ranks -v dtype="$dtype" '
    {d = ($4 - $8) / $4; if (d < 0) d = -d; if (d > worst) worst = d}
    END {print ranks, "ranks", dtype, NR, "steps, relative difference", worst + 0; exit !(NR == 96 && worst + 0 < tolerance)}'
}

for dtype in "" --double; do
  # shellcheck disable=SC2086
  timeout 300 "$DTENSOR_BUILD/examples/digits_one_device" $dtype >"$TMPDIR/one"
  for ranks in 1 2 3 4; do
    # shellcheck disable=SC2086
    timeout 300 "$program" $dtype --ranks $ranks >"$TMPDIR/mesh"
    compare "$([ -n "$dtype" ] && echo 1e-10 || echo 1e-3)"
    # shellcheck disable=SC2086
    timeout 300 "$DTENSOR_BUILD/tools/dtensor-run" -n $ranks "$program" $dtype >"$TMPDIR/processes"
    diff "$TMPDIR/mesh" "$TMPDIR/processes"
    [ $ranks -gt 1 ] || diff "$TMPDIR/one" "$TMPDIR/mesh"
  done
done
[ "$(python3 -m zipfile -l digits.pt | grep -Ec '/(data|constants|tensors)/?[0-9]')" -ge 8 ]  # a weight and a bias of four layers
# It learns.
awk '/^epoch/ {right = $4 / $6} END {print "right at last:", right; exit !(right > 0.6)}' "$TMPDIR/one"

new=$({ diff <(sed 1d "$examples/digits_one_device.cpp") <(sed 1d "$examples/digits_mesh.cpp") || true; } | grep -c '^> ..*')
echo "$new new or changed lines"
[ "$new" -le 16 ]
