#!/usr/bin/env bash
# Every include points down, and the picture in the docs is that of tools/layers. An arrow up is found and named.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/tools/layers" | tee "$TMPDIR/out" | tail -n 1
grep -Eq '^[0-9]+ files, [0-9]+ layers, 0 arrows up$' "$TMPDIR/out"

"$root/tools/layers" --map >"$TMPDIR/map"
python3 - "$TMPDIR/map" "$root/docs/architecture.md" <<'END' || { echo "docs/architecture.md shows other layers than tools/layers --map"; exit 1; }
import sys
sys.exit(open(sys.argv[1]).read().strip() not in open(sys.argv[2]).read())
END

# In a copy where some do not.
copy=$TMPDIR/tree
mkdir -p "$copy" && cp -r "$root"/{src,include,ops,rng,tools} "$copy"
echo '#include <dtensor/tensor/spmd.hpp>' >>"$copy/src/mesh/layout.cpp"
echo '#include "src/dispatch/decide.hpp"' >>"$copy/src/optim/adam8bit.cpp"
echo '#include "src/launch/memory.hpp"' >>"$copy/src/gradients/leaf_gradients.cpp"
echo '#include "src/comm/transports/shared_memory/arena.hpp"' >>"$copy/src/comm/transports/gloo/link.hpp"
! "$copy/tools/layers" >"$TMPDIR/out"
cat "$TMPDIR/out"
grep -Eq '^src/mesh/layout.cpp:[0-9]+: mesh -> tensor: includes include/dtensor/tensor/spmd.hpp, of a layer above its own$' "$TMPDIR/out"
grep -q 'optim includes src/dispatch/decide.hpp, a private header of the core' "$TMPDIR/out"
grep -q 'gradients -> launch' "$TMPDIR/out"
grep -q 'src/comm/transports/gloo and src/comm/transports/shared_memory include each other' "$TMPDIR/out"
