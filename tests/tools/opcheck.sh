#!/usr/bin/env bash
# A few operators of each family under every placement, against one device. The whole: opcheck --all.
set -euo pipefail
opcheck=$DTENSOR_BUILD/tools/opcheck
[ -x "$opcheck" ] || { echo "opcheck is not built: it needs CLI11"; exit 77; }

"$opcheck" --help >"$TMPDIR/help" && grep -q -- --registry "$TMPDIR/help"
"$opcheck" --quick --cases 40 mm addmm add.Tensor mul_.Tensor where.self relu_ sum.dim_IntList max.dim norm.ScalarOpt_dim _log_softmax \
  nll_loss_forward native_layer_norm view transpose.int slice.Tensor cat index.Tensor scatter_.src embedding convolution avg_pool2d \
  linalg_cholesky_ex _foreach_add_.List copy_ sort.stable >"$TMPDIR/out" || { tail -20 "$TMPDIR/out"; exit 1; }
tail -n 1 "$TMPDIR/out"
grep -Eq '^rules [0-9]+, cases [0-9]+, wrong 0, missed [0-9]+$' "$TMPDIR/out"

# Those without a rule, and those whose integers have a meaning; of the registry, for which opcheck --registry is too long here.
"$opcheck" --quick --cases 10 --widen 6 batch_norm_update_stats geqrf linalg_ldl_solve linalg_lu_solve ormqr lu_unpack masked_scatter segment_reduce \
  repeat_interleave.Tensor _embedding_bag_backward _pack_padded_sequence_backward histc unique_dim >"$TMPDIR/registry" || { tail -20 "$TMPDIR/registry"; exit 1; }
grep -Eq '^rules [0-9]+, cases [0-9]+, wrong 0, missed [0-9]+$' "$TMPDIR/registry"

# It prints what an operator's rule moves, and finds nothing to do where there is no such operator.
"$opcheck" --quick mm >"$TMPDIR/mm" && grep -Eq '\(S\(1\)\), \(S\(0\)\) +-> \(P\(sum\)\) +free' "$TMPDIR/mm"
"$opcheck" --list >"$TMPDIR/list" && tail -n 1 "$TMPDIR/list" | grep -Eq '^[0-9]+ operator overloads with a rule'
! "$opcheck" no_such_operator 2>/dev/null
