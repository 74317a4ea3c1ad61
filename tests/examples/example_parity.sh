#!/usr/bin/env bash
# The GPT example trains on every mesh with the losses of one device: float32, float64, dropout, uneven shards.
set -euo pipefail
train() {
  local program=$DTENSOR_BUILD/examples/train_gpt status=0
  timeout 600 "$program" --dim 32 --seq 32 --batch 8 --compare "$@" >"$TMPDIR/out" || status=$?
  tail -n 1 "$TMPDIR/out"
  grep -Fq 'initial parameters: are bit for bit those of one device' "$TMPDIR/out" && return $status
}
four='dp=4;tp=4;dp=2,tp=2;dp=2,sp=2'

train --ranks 4 --meshes "$four" --steps 100 --tolerance 1e-4 --svg "$TMPDIR/losses.svg" --log "$TMPDIR/run.jsonl"
tail -n 1 "$TMPDIR/out" | grep -Eq '^parity: max relative loss difference [0-9.]+e-[0-9]+ over 100 steps \(meshes: '
grep -Fq "(meshes: dp=4 | tp=4 | dp=2,tp=2 | dp=2,sp=2)" "$TMPDIR/out"
# It is really sharded: under tp a rank holds part of the weights, and dp moves 42880 gradients of 4 bytes, no more.
grep -Fq 'tp=4: 42880 parameters, 24112 on a rank;' "$TMPDIR/out"
grep -Eq '^dp=4: 42880 parameters, 42880 on a rank; .* 0.172 MB a rank and step$' "$TMPDIR/out"
[ "$(wc -l <"$TMPDIR/run.jsonl")" = 500 ]
grep -q '</svg>' "$TMPDIR/losses.svg"
python3 - "$TMPDIR/run.jsonl" <<'PY'
import json, sys
losses = [json.loads(line)["loss"] for line in open(sys.argv[1])][-100:]
first, last = losses[0], sum(losses[-10:]) / 10
assert 5.4 < first < 5.7 and last < 0.75 * first, f"one device does not learn: loss {first} at first, {last} at last"
PY

train --ranks 4 --meshes "$four" --steps 100 --dtype float64 --tolerance 1e-10
train --ranks 4 --meshes "$four" --steps 20 --dropout 0.1 --dtype float64 --tolerance 1e-10
train --ranks 8 --mesh dp=2,sp=2,tp=2 --steps 20 --dtype float64 --tolerance 1e-10
train --ranks 3 --meshes 'dp=3;tp=3;sp=3' --steps 20 --dtype float64 --tolerance 1e-10
train --ranks 1 --steps 20 --tolerance 0

# A difference above the tolerance is a failure.
if train --ranks 2 --mesh tp=2 --steps 20 --tolerance 0 >"$TMPDIR/strict"; then
  grep -q 'difference 0.00e+00' "$TMPDIR/strict" || { echo "--tolerance 0 passed with:"; cat "$TMPDIR/strict"; exit 1; }
fi
