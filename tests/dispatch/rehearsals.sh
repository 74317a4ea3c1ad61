#!/usr/bin/env bash
# Operators that are tried on stand-ins before they communicate stay inside of them: those with positions, pivots and lengths, under
# valgrind. All operators: tools/opcheck/memcheck build
set -euo pipefail
[ -x "$DTENSOR_BUILD/tools/opcheck" ] || { echo "opcheck is not built: it needs CLI11"; exit 77; }
command -v valgrind >/dev/null || { echo "valgrind is not installed"; exit 77; }
tools/opcheck/memcheck "$DTENSOR_BUILD" linalg_ldl_solve linalg_lu_solve lu_unpack ormqr geqrf index_select gather scatter index_add index_put \
  take put nll_loss_forward embedding segment_reduce max_unpool2d >"$TMPDIR/out" 2>"$TMPDIR/err" || { tail -40 "$TMPDIR/err"; exit 1; }
cat "$TMPDIR/out"
grep -Eq '^rehearsed operators [1-9][0-9]*, calls [0-9]+: taken [1-9][0-9]*, ' "$TMPDIR/out"
