#!/usr/bin/env bash
# A model of experts trains with the losses of one device, however its experts are cut and balanced.
set -euo pipefail
train() {
  local status=0
  timeout 600 "$DTENSOR_BUILD/examples/train" --model "${model:-mixtral-debug}" --steps 4 --batch 8 --dtype float64 --compare --tolerance 1e-10 "$@" \
    >"$TMPDIR/out" 2>&1 || status=$?
  echo "${model:-} $*: $(tail -n 1 "$TMPDIR/out")"
  [ $status = 0 ] || cat "$TMPDIR/out"
  grep -Fq 'initial parameters: are bit for bit those of one device' "$TMPDIR/out" && return $status
}
train --ranks 4 --meshes 'dp=2,ep=2;ep=4;ep=2,tp=2;dp=2,tp=2'
train --ranks 4 --mesh dp=2,ep=2 --fsdp
train --ranks 4 --mesh ep=2,tp=2 --sp --capacity 0.9
train --ranks 4 --mesh cp=2,ep=2 --attention ring
train --ranks 4 --mesh pp=2,ep=2 --microbatches 4 --schedule zbv --balance bias
train --ranks 8 --mesh pp=2,dp=2,ep=2 --microbatches 4 --fsdp --capacity 1
train --ranks 4 --mesh dp=2,ep=2 --capacity 0.9 --expert-map "$TMPDIR/map.svg"  # a box for each of 4 experts of 2 layers
train --ranks 4 --mesh dp=2,ep=2 --tiles 3
[ "$(grep -c '<title>' "$TMPDIR/map.svg")" = 8 ]
for dispatch in deduplicated allgather automatic; do train --ranks 4 --mesh dp=2,ep=2 --dispatch $dispatch --balance none; done
for model in qwen3-moe-debug deepseek-debug; do
  train --ranks 4 --meshes 'dp=2,ep=2;ep=2,tp=2;cp=2,ep=2'
  train --ranks 4 --mesh dp=2,ep=2 --fsdp
  train --ranks 4 --mesh ep=2,tp=2 --sp
  train --ranks 4 --mesh pp=2,ep=2 --microbatches 4
done
unset model

# Nothing but microbatches in order: bit for bit.
train --ranks 2 --mesh pp=2 --microbatches 4
grep -qx 'gradients: bit-equal' "$TMPDIR/out"

refuses() {
  ! timeout 60 "$DTENSOR_BUILD/examples/train" "${@:2}" >"$TMPDIR/out" 2>&1 && grep -Fq -- "$1" "$TMPDIR/out" ||
    { echo "expected a refusal with '$1' from: ${*:2}"; cat "$TMPDIR/out"; exit 1; }
}
refuses 'ep cuts experts, and llama3-debug has none' --ranks 4 --model llama3-debug --mesh ep=4
refuses 'no mesh has a dimension ep' --ranks 4 --model mixtral-debug --mesh dp=4 --dispatch allgather
refuses 'llama3-debug has no experts' --ranks 4 --model llama3-debug --mesh dp=4 --balance bias
refuses 'has some of the layers only' --ranks 4 --model mixtral-debug --mesh pp=2,ep=2 --microbatches 4 --expert-map "$TMPDIR/map.svg"
refuses 'experts = ranks x experts of a rank: 4 experts cannot be shared alike by 3 ranks' --model mixtral-debug --ranks 3 --mesh ep=3
