#!/usr/bin/env bash
# The zoo's models train fully sharded, in every way and beside tensor and sequence parallelism, with the losses of one device.
set -euo pipefail
train() {
  local status=0
  timeout 600 "$DTENSOR_BUILD/examples/train" --compare --fsdp --steps 5 "$@" >"$TMPDIR/out" || status=$?
  [ $status = 0 ] || cat "$TMPDIR/out"
  echo "$* | $(tail -n 1 "$TMPDIR/out")"
  grep -Fq 'initial parameters: are bit for bit those of one device' "$TMPDIR/out" && return $status
}

for model in gpt2 llama3 vit resnest; do
  for zero in 1 2 3; do train --model $model-debug --zero $zero --ranks 4 --meshes 'dp=4;replicas=2,dp=2;dp=2,tp=2' --dtype float64 --tolerance 1e-9; done
  train --model $model-debug --ranks 4 --mesh dp=2,tp=2 --sp --dtype float64 --tolerance 1e-9
  train --model $model-debug --ranks 3 --mesh dp=3 --dtype float64 --tolerance 1e-9
  train --model $model-debug --ranks 8 --mesh replicas=2,dp=2,tp=2 --dtype float64 --tolerance 1e-9
done
for model in gpt2 llama3 vit; do train --model $model-debug --ranks 4 --meshes 'dp=4;dp=2,tp=2' --tolerance 1e-4; done

# A rank keeps a part of everything.
train --model llama3-debug --ranks 4 --mesh dp=4
grep -Eq '^dp=4: 125248 parameters, 31[0-9]{3} on a rank' "$TMPDIR/out"
