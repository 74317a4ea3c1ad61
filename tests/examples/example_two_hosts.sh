#!/usr/bin/env bash
# Two hosts (network namespaces) with two ranks each train with the losses of four threads, to the last bit.
set -euo pipefail
export OMP_NUM_THREADS=1
args=(--mesh dp=2,tp=2 --dim 32 --seq 32 --batch 8 --steps 10)
program=$DTENSOR_BUILD/examples/train_gpt
losses() { sed 's/,"ms".*//' "$TMPDIR/$1.jsonl"; }

timeout 300 tests/comm/two_hosts.sh "$program" "${args[@]}" --log "$TMPDIR/hosts.jsonl"  # 77: no namespaces here
timeout 300 "$program" --ranks 4 "${args[@]}" --log "$TMPDIR/threads.jsonl" >/dev/null
[ "$(losses threads | wc -l)" = 10 ]
diff <(losses threads) <(losses hosts)
