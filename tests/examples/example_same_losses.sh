#!/usr/bin/env bash
# The same program gives the same losses, to the last bit, with ranks as threads and as processes.
set -euo pipefail
export OMP_NUM_THREADS=1
args=(--meshes 'dp=2,tp=2;dp=2,sp=2' --dim 32 --seq 32 --batch 8 --steps 10)
program=$DTENSOR_BUILD/examples/train_gpt
losses() { sed 's/,"ms":.*//' "$TMPDIR/$1.jsonl"; }

timeout 300 "$program" --ranks 4 "${args[@]}" --log "$TMPDIR/threads.jsonl" >/dev/null
timeout 300 "$DTENSOR_BUILD/tools/dtensor-run" -n 4 "$program" "${args[@]}" --log "$TMPDIR/processes.jsonl" >/dev/null
[ "$(losses threads | wc -l)" = 20 ]
diff <(losses threads) <(losses processes)
