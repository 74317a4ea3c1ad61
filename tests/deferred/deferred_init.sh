#!/usr/bin/env bash
# A model of 7 billion parameters on 64 ranks: one rank's shard takes its part of the memory and 64 MiB at most, and has the values of one
# device.
set -euo pipefail
program=$DTENSOR_BUILD/examples/deferred_init

timeout 500 "$program" --mesh dp=8,tp=8 --rank 37 --limit 64 --check 100 | tee "$TMPDIR/out"
grep -Fq 'its shard of 6.74 billion parameters' "$TMPDIR/out"
grep -Fq '100 of 100 elements are those of one device' "$TMPDIR/out"

small=(--layers 2 --dim 96 --hidden 250 --vocab 130)
for mesh in dp=3 tp=5 dp=2,tp=3; do
  timeout 60 "$program" "${small[@]}" --mesh "$mesh" --rank 2 --check 500 >"$TMPDIR/said"
  grep -Eq '^(5[0-9]{2}) of \1 elements' "$TMPDIR/said"
done

refuse() {
  if timeout 60 "$program" "${@:2}" >"$TMPDIR/out" 2>&1 || ! grep -Fq -- "$1" "$TMPDIR/out"; then
    echo "not refused with '$1': ${*:2}"
    cat "$TMPDIR/out"
    exit 1
  fi
}
refuse 'is not among the 4 ranks' "${small[@]}" --mesh dp=4 --rank 4
refuse 'expected NAME=SIZE' --mesh pp=4
refuse 'more than --limit' "${small[@]}" --limit 0.001
