#!/usr/bin/env bash
# launch keeps freed memory, and leaves the allocator alone where it is told to.
set -euo pipefail
case="large blocks: what is freed is taken again"
"$DTENSOR_BUILD/tests/dtensor-tests" "$case" >/dev/null
! DTENSOR_KEEP_MEMORY=0 "$DTENSOR_BUILD/tests/dtensor-tests" "$case" >"$TMPDIR/out" || { echo "memory was kept"; exit 1; }
grep -q "the block went back to the system" "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }
