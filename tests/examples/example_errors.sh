#!/usr/bin/env bash
# Bad input to the examples: a clear error, a failing exit status, no hang; with ranks as threads and as processes.
set -euo pipefail
program=$DTENSOR_BUILD/examples/train_gpt
small=(--dim 32 --seq 32 --batch 8 --steps 2)

# refuse COUNT TEXT COMMAND...: the command fails within a minute, and prints TEXT at least COUNT times.
refuse() {
  local count=$1 text=$2 status=0 got
  shift 2
  timeout 60 "$@" >"$TMPDIR/out" 2>&1 || status=$?
  got=$(grep -Fc -- "$text" "$TMPDIR/out" || true)
  if [ "$status" = 0 ] || [ "$status" -ge 124 ] || [ "$got" -lt "$count" ]; then
    echo "exit status $status, $got times '$text' (expected $count), from: $*"
    cat "$TMPDIR/out"
    exit 1
  fi
}

for mesh in dp dp=0 dp=2,dp=2 pp=4 dp=2x; do
  refuse 1 'expected NAME=SIZE' "$program" --ranks 4 --mesh "$mesh"
done
refuse 1 "the mesh 'dp2'" "$program" --meshes 'dp=4;dp2'
refuse 1 '--mesh' "$program" --mesh dp=1 --meshes tp=1
refuse 1 '/nonexistent/text' "$program" --ranks 4 --data /nonexistent/text
refuse 1 'expected cpu or cuda' "$program" --device tpu
refuse 1 'choose sizes whose product is 4' "$program" --ranks 4 --mesh dp=2,tp=1 "${small[@]}"
refuse 1 'bytes, but a sequence needs' "$program" --ranks 2 --data "$0" "${small[@]}" --seq 100000
refuse 1 'multiple of --heads' "$program" --dim 30 --heads 4
refuse 1 'expected a number above 0' "$program" --steps 0
refuse 1 'there is no folder' "$program" --log /nonexistent/run.jsonl
refuse 1 'there is no folder' "$program" --svg /nonexistent/losses.svg
refuse 1 'expected a file to write' "$program" --svg "$TMPDIR"
refuse 1 'expected a file to write' "$program" --log "$TMPDIR"
refuse 1 'unknown transport' "$program" --ranks 2 --transport pigeon
refuse 1 'expected at most 4096' "$program" --ranks 100000000
refuse 1 'need the transport' "$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$program" --transport fake
refuse 1 'multiple of --heads' "$DTENSOR_BUILD/examples/gpt_step" --dim 33

# Nothing is trained before everything is checked, and what the log file held stays.
echo 'an earlier run' >"$TMPDIR/log"
refuse_early() {  # refuse_early TEXT OPTION...
  refuse 1 "$1" "$program" "${small[@]}" --log "$TMPDIR/log" "${@:2}"
  ! grep -q 'step  ' "$TMPDIR/out" || { echo "trained first: $*"; exit 1; }
  [ "$(cat "$TMPDIR/log")" = 'an earlier run' ] || { echo "another log file after: $*"; exit 1; }
}
refuse_early 'choose sizes whose product is 2' --meshes 'dp=2;dp=4'
refuse_early 'expected a file to write' --ranks 2 --svg "$TMPDIR"
refuse_early 'bytes, but a sequence needs' --ranks 2 --data "$0" --seq 100000

# Options that the run would do nothing with.
refuse 1 "unknown dimension 'replicas'" "$program" --mesh replicas=4
zoo=$DTENSOR_BUILD/examples/train
refuse 1 'no mesh has a dimension tp' "$zoo" --ranks 2 --sp
refuse 1 'no mesh has a dimension tp' "$zoo" --ranks 2 --mesh dp=2 --overlap 2
refuse 1 'no linear layers that tp cuts' "$zoo" --model resnest-debug --mesh tp=2 --overlap 2
refuse 1 'takes images' "$zoo" --model vit-debug --seq 32

# As processes, each rank says it (dtensor-run may end the last ones first).
launch=("$DTENSOR_BUILD/tools/dtensor-run" -n 2)
refuse 1 'expected NAME=SIZE' "${launch[@]}" "$program" --mesh dp
refuse 1 'addr2line -Cfpe' "${launch[@]}" "$program" --mesh dp=4 "${small[@]}"  # where it was thrown
refuse 1 '/nonexistent/text' "${launch[@]}" "$program" --data /nonexistent/text
refuse 2 'choose sizes whose product is 2' "${launch[@]}" "$program" --mesh dp=3 "${small[@]}"
refuse 1 'dtensor-run started 2 ranks; --ranks 3 counts without a launcher only' "${launch[@]}" "$program" --ranks 3 --mesh dp=3 "${small[@]}"

# Under a launcher --ranks does not count, which is said where it asks for another number.
"${launch[@]}" "$DTENSOR_BUILD/examples/custom_op" --ranks 2 >"$TMPDIR/out" 2>&1
! grep -q 'counts without' "$TMPDIR/out"
"${launch[@]}" "$DTENSOR_BUILD/examples/custom_op" --ranks 4 >"$TMPDIR/out" 2>&1
grep -Fqx 'dtensor: dtensor-run started 2 ranks; --ranks 4 counts without a launcher only' "$TMPDIR/out"
