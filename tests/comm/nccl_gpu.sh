#!/usr/bin/env bash
# Ranks on GPUs, a process each, under dtensor-run: all collectives, and what ranks say when one dies, throws, leaves or stalls.
set -euo pipefail
gpus=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
[ "$gpus" -ge 2 ] || { echo "fewer than two GPUs ($gpus)"; exit 77; }
ldd "$DTENSOR_BUILD/libdtensor.so" | grep -q libnccl || { echo "this build has no nccl transport"; exit 77; }
run=$DTENSOR_BUILD/tools/dtensor-run
program=("$DTENSOR_BUILD/tests/dtensor-tests" "nccl gpu: a rank of a job on GPUs")

# expect MODE STATUS TEXT: the job on all GPUs ends with STATUS within five minutes and prints TEXT.
expect() {
  local status=0
  DTENSOR_DEADLINE=${deadline:-60} DTENSOR_TEST_MODE=$1 timeout 300 "$run" -n "$gpus" --prefix-output "${program[@]}" >"$TMPDIR/out" 2>&1 || status=$?
  grep -Eq -- "$3" "$TMPDIR/out" || { echo "$1: no '$3' in:"; cat "$TMPDIR/out"; exit 1; }
  [ "$status" = "$2" ] || { echo "$1: exit status $status, expected $2:"; cat "$TMPDIR/out"; exit 1; }
}

expect '' 0 "$gpus ranks over nccl"
DTENSOR_CHECK_CALLS=1 expect '' 0 "$gpus ranks over nccl"
expect kill:1 137 'rank 0\] error: .*rank 1 failed: its process ended'
expect throw:1 1 'rank 0\] error: .*rank 1 failed: out of cheese'
expect leave:1 1 'rank 1 has left without calling it'
deadline=5 expect stall:1 1 'did not complete within 5 s'
