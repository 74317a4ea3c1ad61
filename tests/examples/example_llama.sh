#!/usr/bin/env bash
# The Llama trainer on a mesh has the losses of the one on one device, and at most 15 lines are new in it. docs/parallel.md shows them.
set -euo pipefail
export OMP_NUM_THREADS=1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
examples=$root/examples
timeout 300 "$DTENSOR_BUILD/examples/llama_one_device" >"$TMPDIR/one"
for ranks in 2 4; do
  timeout 300 "$DTENSOR_BUILD/examples/llama_mesh" --ranks $ranks >"$TMPDIR/mesh"
  paste "$TMPDIR/one" "$TMPDIR/mesh" | awk '{d = ($4 - $8) / $4; if (d < 0) d = -d; if (d > worst) worst = d} END {print NR, "steps, relative difference", worst; exit !(NR == 20 && worst < 1e-4)}'
done
new=$({ diff <(sed 1d "$examples/llama_one_device.cpp") <(sed 1d "$examples/llama_mesh.cpp") || true; } | grep -c '^> ..*')
echo "$new new or changed lines"
[ "$new" -le 15 ]
diff <(diff -U0 <(sed 1d "$examples/llama_one_device.cpp") <(sed 1d "$examples/llama_mesh.cpp") | grep '^[-+][^-+]') <(sed -n '/^```diff/,/^```/{/^```/d;p}' "$root/docs/parallel.md")
