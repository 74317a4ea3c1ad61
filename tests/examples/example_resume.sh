#!/usr/bin/env bash
# Training goes on from checkpoints: with the same bits on the same mesh, over other transports too, and to rounding on other meshes, as a
# pipeline, and on one device. With dropout.
set -euo pipefail
export OMP_NUM_THREADS=1
gpt() { timeout 300 "${launch[@]}" "$DTENSOR_BUILD/examples/train_gpt" --dim 32 --seq 32 --batch 8 --steps 12 --dtype float64 --dropout 0.1 "$@" >"$TMPDIR/out"; }
zoo() {
  timeout 300 "${launch[@]}" "$DTENSOR_BUILD/examples/train" --model gpt2-debug --seq 32 --batch 8 --steps 12 --dtype float64 --dropout 0.1 \
    --microbatches 4 "$@" >"$TMPDIR/out"
}
losses() { sed -E 's/.*"step":([0-9]+),"loss":([^,]*),.*/\1 \2/' "$TMPDIR/$1.jsonl" | tail -n 7; }
close() {
  paste <(losses "$1") <(losses "$2") | awk '{d = ($4 - $2) / $2; if (d < 0) d = -d; if ($1 != $3 || d > 1e-11) { print "apart: " $0; bad = 1 }} END { exit bad || NR != 7 }'
}
launch=()
processes=("$DTENSOR_BUILD/tools/dtensor-run" -n 4)

gpt --mesh dp=2,tp=2 --save "$TMPDIR/run" --every 5 --log "$TMPDIR/whole.jsonl"
[ "$(ls "$TMPDIR/run" | sort -V | tr '\n' ' ')" = 'step-5 step-10 step-12 ' ] || { ls "$TMPDIR/run"; exit 1; }
gpt --mesh dp=2,tp=2 --resume "$TMPDIR/run" --from-step 5 --log "$TMPDIR/again.jsonl"
diff <(losses whole) <(losses again)
launch=("${processes[@]}")
gpt --mesh dp=2,tp=2 --resume "$TMPDIR/run" --from-step 5 --save "$TMPDIR/shm" --log "$TMPDIR/shm.jsonl"
diff <(losses whole) <(losses shm)
gpt --mesh tp=4 --resume "$TMPDIR/run" --from-step 5 --log "$TMPDIR/other.jsonl"
close whole other
launch=()
gpt --mesh dp=3 --resume "$TMPDIR/run" --from-step 5 --log "$TMPDIR/other.jsonl" --compare --tolerance 1e-11

# Parameters are tied; a pipeline's checkpoint is the model's.
zoo --mesh dp=2,tp=2 --fsdp --save "$TMPDIR/zoo" --every 5 --log "$TMPDIR/whole.jsonl"
zoo --mesh dp=2,tp=2 --fsdp --resume "$TMPDIR/zoo" --from-step 5 --log "$TMPDIR/again.jsonl"
diff <(losses whole) <(losses again)
zoo --mesh pp=2,tp=2 --resume "$TMPDIR/zoo" --from-step 5 --save "$TMPDIR/pipe" --every 6 --log "$TMPDIR/pipe.jsonl"
close whole pipe
zoo --mesh pp=2,tp=2 --resume "$TMPDIR/pipe" --from-step 6 --log "$TMPDIR/again.jsonl"
diff <(losses pipe | tail -n 6) <(losses again | tail -n 6)
zoo --mesh pp=4 --schedule zb1p --resume "$TMPDIR/pipe" --from-step 6 --log "$TMPDIR/again.jsonl"
paste <(losses pipe | tail -n 6) <(losses again | tail -n 6) | awk '{d = ($4 - $2) / $2; if (d < 0) d = -d; if ($1 != $3 || d > 1e-11) exit 1}'
launch=("$DTENSOR_BUILD/tools/dtensor-run" -n 3)
zoo --mesh dp=3 --fsdp --resume "$TMPDIR/zoo" --from-step 5 --log "$TMPDIR/other.jsonl"
close whole other
launch=()

# A job that is told to stop saves, and the same command goes on with it.
("$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$DTENSOR_BUILD/examples/train_gpt" --dim 32 --seq 32 --batch 8 --steps 100000 --mesh dp=2 --save "$TMPDIR/told" \
  --resume --log "$TMPDIR/told.jsonl" >"$TMPDIR/out" 2>&1) &
for _ in {1..1200}; do [ "$(wc -l <"$TMPDIR/told.jsonl" 2>/dev/null || echo 0)" -gt 5 ] && break; sleep 0.1; done
pkill -TERM -f "dtensor-run.*$TMPDIR/told" || { echo "it does not run"; cat "$TMPDIR/out"; exit 1; }
wait $! || true
[ "$(ls "$TMPDIR/told" | wc -l)" = 1 ] || { echo "nothing was saved"; cat "$TMPDIR/out"; exit 1; }

# A job whose ranks are killed goes on from the copies in memory.
job=("$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$DTENSOR_BUILD/examples/train_gpt" --dim 32 --seq 32 --batch 8 --steps 300 --mesh dp=2 --save "$TMPDIR/killed"
  --copy-every 2 --resume)
("${job[@]}" --log "$TMPDIR/killed.jsonl" >"$TMPDIR/out" 2>&1) &
for _ in {1..1200}; do [ "$(wc -l <"$TMPDIR/killed.jsonl" 2>/dev/null || echo 0)" -gt 5 ] && break; sleep 0.1; done
pkill -KILL -f "^[^ ]*train_gpt.*$TMPDIR/killed" || { echo "it does not run"; cat "$TMPDIR/out"; exit 1; }
wait $! || true
timeout 300 "${job[@]}" --log "$TMPDIR/again.jsonl" >"$TMPDIR/out" 2>&1 || { cat "$TMPDIR/out"; exit 1; }
first=$(sed -E '1s/.*"step":([0-9]+).*/\1/;q' "$TMPDIR/again.jsonl")
[ "$first" -ge 4 ] || { echo "it began with step $first"; exit 1; }

# What a run cannot go on from.
fails() {
  local text=$1
  shift
  if "$@" 2>"$TMPDIR/error"; then echo "expected a failure with '$text'"; exit 1; fi
  grep -q -- "$text" "$TMPDIR/error" || grep -q -- "$text" "$TMPDIR/out" || { echo "no '$text' in:"; cat "$TMPDIR/error"; exit 1; }
}
fails 'is of step 12; expected fewer than --steps, 12' gpt --mesh dp=2 --resume "$TMPDIR/shm"
fails "does not fit the state: it has no 'model.blocks" gpt --mesh dp=2 --resume "$TMPDIR/run" --from-step 5 --layers 3
fails 'there is no such folder' gpt --mesh dp=2 --resume "$TMPDIR/none"
fails 'has no complete step 6; closest: 5' gpt --mesh dp=2 --resume "$TMPDIR/run" --from-step 6
fails 'names no folder' gpt --mesh dp=2 --resume
