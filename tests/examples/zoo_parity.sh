#!/usr/bin/env bash
# The zoo's models of debug size train by examples/train with the losses of one device, and learn. zoo_parity_test.cpp has every mesh.
set -euo pipefail
train() {
  local status=0
  timeout 600 "$DTENSOR_BUILD/examples/train" --compare "$@" >"$TMPDIR/out" || status=$?
  [ $status = 0 ] || cat "$TMPDIR/out"
  echo "$* | $(tail -n 1 "$TMPDIR/out")"
  grep -Fq 'initial parameters: are bit for bit those of one device' "$TMPDIR/out" && return $status
}

# learns FACTOR: one device's loss falls by that.
learns() {
  python3 - "$TMPDIR/run.jsonl" "$1" <<'PY'
import json, sys
losses = [r["loss"] for r in map(json.loads, open(sys.argv[1])) if r["mesh"] == "one device"]
first, last = losses[0], sum(losses[-5:]) / 5
print(f"one device: loss {first:.4f} -> {last:.4f}")
assert last < float(sys.argv[2]) * first
PY
}

for model in gpt2 llama3; do
  train --model $model-debug --ranks 2 --meshes 'dp=2;tp=2' --steps 60 --tolerance 1e-4 --log "$TMPDIR/run.jsonl"
  learns 0.75
done
train --model vit-debug --ranks 2 --meshes 'dp=2;tp=2' --steps 100 --lr 1e-3 --tolerance 1e-4 --log "$TMPDIR/run.jsonl"
learns 0.85
# Where a ReLU's input is within rounding of zero, float32 on one device and on a mesh part by more than rounding: few steps, and small.
train --model resnest-debug --ranks 2 --meshes 'dp=2;tp=2' --steps 5 --lr 3e-4 --tolerance 1e-4
train --model resnest-debug --ranks 2 --meshes 'dp=2;tp=2' --steps 40 --dtype float64 --tolerance 1e-9 --log "$TMPDIR/run.jsonl"
learns 0.5
for model in gpt2 llama3 vit resnest; do
  train --model $model-debug --ranks 4 --meshes 'dp=2,tp=2;dp=2,sp=2' --sp --steps 5 --dtype float64 --tolerance 1e-9
done

# A name that is none is answered with those that are.
if "$DTENSOR_BUILD/examples/train" --model gpt3 >"$TMPDIR/out" 2>&1; then exit 1; fi
grep -q llama3-405b "$TMPDIR/out"
