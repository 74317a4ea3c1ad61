#!/usr/bin/env bash
# dtensor-checkpoint: what it says of checkpoints, and of what is none.
set -euo pipefail
export OMP_NUM_THREADS=1
tool=$DTENSOR_BUILD/tools/dtensor-checkpoint run=$TMPDIR/run
timeout 300 "$DTENSOR_BUILD/examples/train" --model gpt2-debug --seq 16 --batch 4 --steps 6 --mesh dp=2 --fsdp --save "$run" --every 2 >/dev/null

# says TEXT COMMAND...: it succeeds and prints TEXT. fails STATUS TEXT COMMAND...: it ends with STATUS and prints TEXT.
says() {
  local text=$1
  shift
  "$@" >"$TMPDIR/out" 2>&1 || { echo "failed: $*"; cat "$TMPDIR/out"; exit 1; }
  grep -Eq -- "$text" "$TMPDIR/out" || { echo "no '$text' from $*:"; cat "$TMPDIR/out"; exit 1; }
}
fails() {
  local wanted=$1 text=$2 status=0
  shift 2
  "$@" >"$TMPDIR/out" 2>&1 || status=$?
  [ $status = "$wanted" ] && grep -Eq -- "$text" "$TMPDIR/out" || { echo "status $status, expected $wanted with '$text', from $*:"; cat "$TMPDIR/out"; exit 1; }
}
says ' 4 .* 2 ' "$tool" list "$run"
says 'step 6, ' "$tool" show "$run"
says 'optimizer.state.model.*exp_avg' "$tool" show "$run/step-4" --only 'optimizer.*'
says '= 4' "$tool" show "$run/step-4" --only schedule.step
says 'every checksum is right' "$tool" verify "$run"
says 'no difference' "$tool" diff "$run/step-4" "$run/step-4"
fails 1 'e-[0-9]+  model\.' "$tool" diff "$run/step-4" "$run/step-6" --only 'model.*'
says '[0-9]+ tensors' "$tool" merge "$run" "$TMPDIR/merged"
says 'model.safetensors|1 files' "$tool" show "$TMPDIR/merged"
fails 1 'has files; expected a new or empty folder' "$tool" merge "$run" "$TMPDIR/merged"
says '2 files|[3-9] files' bash -c "'$tool' merge '$run' '$TMPDIR/many' --file-gib 0.0001 && '$tool' show '$TMPDIR/many'"
says 'would remove step 2' "$tool" prune "$run" --keep-last 2 --dry-run
says 'removed step 2' "$tool" prune "$run" --keep-last 2
[ "$(ls "$run" | tr '\n' ' ')" = 'step-4 step-6 ' ] || { ls "$run"; exit 1; }

data=$(ls "$run"/step-6/*.safetensors | head -1)
size=$(stat -c %s "$data")
printf 'x' | dd of="$data" bs=1 seek=$((size - 9)) conv=notrunc status=none
fails 1 "tensor '.*': bytes .* are damaged" "$tool" verify "$run"
truncate -s $((size - 1)) "$data"
fails 1 "has $((size - 1)) bytes; expected $size" "$tool" verify "$run"
fails 1 'there is no ' "$tool" show "$TMPDIR/none"
fails 1 'has no complete step' "$tool" list "$TMPDIR"
fails 1 'has no checkpoint; expected index.json' "$tool" verify "$TMPDIR"
fails 2 'subcommand is required' "$tool"
says 'diff' "$tool" --help
