#!/usr/bin/env bash
# Models whose positions are cut over ranks train with the losses of one device: every method, beside every other dimension of a mesh.
set -euo pipefail
train() {
  local status=0
  timeout 600 "$DTENSOR_BUILD/examples/train" --ranks 4 --steps 4 --dtype float64 --compare --tolerance 1e-10 "$@" >"$TMPDIR/out" 2>&1 ||
    status=$?
  echo "$*: $(tail -n 1 "$TMPDIR/out")"
  grep -Fq 'initial parameters: are bit for bit those of one device' "$TMPDIR/out" && return $status
}
for method in ring zigzag stripes allgather ulysses usp tokenring doublering automatic; do
  train --model llama3-debug --mesh cp=4 --seq 61 --attention $method
done
train --model llama3-debug --mesh cp=4 --seq 61 --attention usp --neighbours 4
train --model gpt2-debug --mesh cp=4 --attention ring
grep -Eq '^gradients: (bit-equal|largest difference [0-9.]+e-1[0-9] of the largest gradient)$' "$TMPDIR/out"  # a bias of keys has none
train --model llama3-debug --mesh cp=4 --attention ring --dropout 0.1
train --model llama3-debug --meshes 'dp=2,cp=2;cp=2,tp=2'
train --model llama3-debug --mesh cp=2,tp=2 --sp
train --model llama3-debug --mesh dp=2,cp=2 --fsdp
train --model llama3-debug --mesh pp=2,cp=2 --schedule zbv --microbatches 4
train --model llama3-debug --mesh cp=4 --seq 61 --documents
train --model llama3-debug --mesh dp=2,cp=2 --documents --attention ulysses --fsdp
train --model gpt2-debug --meshes 'cp=4;dp=2,cp=2' --attention ulysses

refuses() {
  ! timeout 60 "$DTENSOR_BUILD/examples/train" --ranks 4 "${@:2}" >"$TMPDIR/out" 2>&1 && grep -Fq -- "$1" "$TMPDIR/out" ||
    { echo "expected a refusal with '$1' from: ${*:2}"; cat "$TMPDIR/out"; exit 1; }
}
refuses 'no mesh has a dimension cp' --mesh dp=4 --attention ring
refuses 'cp cuts positions of text' --model vit-debug --mesh cp=4
refuses 'needs a dimension cp' --mesh dp=4 --documents
refuses 'hint: set .neighbours to one (--neighbours' --mesh cp=4 --attention usp --neighbours 3
refuses 'goes with a mesh dimension cp' --mesh cp=4 --attention ring --neighbours 2
refuses 'pigeon' --mesh cp=4 --attention pigeon
