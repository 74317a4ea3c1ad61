#!/usr/bin/env bash
# Training goes on from files: with the same bits on the same mesh, over other transports too, and to rounding on other meshes and one device.
set -euo pipefail
export OMP_NUM_THREADS=1
gpt() { timeout 300 "${launch[@]}" "$DTENSOR_BUILD/examples/train_gpt" --dim 32 --seq 32 --batch 8 --steps 12 --dtype float64 "$@" >"$TMPDIR/out"; }
zoo() { timeout 300 "${launch[@]}" "$DTENSOR_BUILD/examples/train" --model llama3-debug --seq 32 --batch 8 --steps 12 --dtype float64 "$@" >"$TMPDIR/out"; }
losses() { sed -E 's/.*"step":([0-9]+),"loss":([^,]*),.*/\1 \2/' "$TMPDIR/$1.jsonl" | tail -n 7; }
close() {
  paste <(losses "$1") <(losses "$2") | awk '{d = ($4 - $2) / $2; if (d < 0) d = -d; if ($1 != $3 || d > 1e-11) { print "apart: " $0; bad = 1 }} END { exit bad || NR != 7 }'
}
launch=()
processes=("$DTENSOR_BUILD/tools/dtensor-run" -n 4)

gpt --mesh dp=2,tp=2 --save "$TMPDIR/run" --save-at 5 --log "$TMPDIR/whole.jsonl"
gpt --mesh dp=2,tp=2 --resume "$TMPDIR/run" --log "$TMPDIR/again.jsonl"
diff <(losses whole) <(losses again)
launch=("${processes[@]}")
gpt --mesh dp=2,tp=2 --resume "$TMPDIR/run" --save "$TMPDIR/shm" --log "$TMPDIR/shm.jsonl"
diff <(losses whole) <(losses shm)
gpt --mesh tp=4 --resume "$TMPDIR/run" --log "$TMPDIR/other.jsonl"
close whole other
launch=()
gpt --mesh dp=3 --resume "$TMPDIR/run" --log "$TMPDIR/other.jsonl" --compare --tolerance 1e-11

zoo --mesh dp=2,tp=2 --fsdp --save "$TMPDIR/zoo" --save-at 5 --log "$TMPDIR/whole.jsonl"
zoo --mesh dp=2,tp=2 --fsdp --resume "$TMPDIR/zoo" --log "$TMPDIR/again.jsonl"
diff <(losses whole) <(losses again)
launch=("$DTENSOR_BUILD/tools/dtensor-run" -n 3)
zoo --mesh dp=3 --fsdp --resume "$TMPDIR/zoo" --log "$TMPDIR/other.jsonl"
close whole other
launch=()

# Files that a run cannot go on from.
if gpt --mesh dp=2 --resume "$TMPDIR/shm" 2>"$TMPDIR/error"; then exit 1; fi
grep -q 'are from after step 12; expected fewer than --steps, 12' "$TMPDIR/error"
if gpt --mesh dp=2 --resume "$TMPDIR/run" --layers 3 2>"$TMPDIR/error"; then exit 1; fi
grep -q "does not fit the module: it has no 'blocks" "$TMPDIR/error"
if gpt --mesh dp=2 --resume "$TMPDIR/none" 2>"$TMPDIR/error" >&2; then exit 1; fi
