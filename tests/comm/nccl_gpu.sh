#!/usr/bin/env bash
# Ranks on GPUs, a process each, under dtensor-run: all collectives, what ranks say when one dies, throws, leaves or stalls, and training.
# On a machine with one GPU two ranks share it: NCCL takes them for ranks of two hosts, and they talk over sockets. As many as
# DTENSOR_GPU_RANKS says.
set -euo pipefail
gpus=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
[ "$gpus" -ge 1 ] || { echo "no GPU"; exit 77; }
ldd "$DTENSOR_BUILD/libdtensor.so" >"$TMPDIR/said"
grep -q libnccl "$TMPDIR/said" || { echo "this build has no nccl transport"; exit 77; }
ranks=$((gpus > 1 ? gpus : 2))
ranks=${DTENSOR_GPU_RANKS:-$ranks}
program=("$DTENSOR_BUILD/tests/dtensor-tests")
if [ "$ranks" -gt "$gpus" ]; then
  export CUDA_VISIBLE_DEVICES=0 NCCL_SOCKET_IFNAME=lo
  program=(sh -c 'NCCL_HOSTID=$RANK exec "$@"' sh "${program[@]}")
fi

# expect TEST MODE STATUS TEXT: the job ends with STATUS within five minutes and prints TEXT.
expect() {
  local status=0
  DTENSOR_DEADLINE=${deadline:-60} DTENSOR_TEST_MODE=$2 timeout 300 "$DTENSOR_BUILD/tools/dtensor-run" -n "$ranks" --prefix-output \
    "${program[@]}" "nccl gpu: $1" >"$TMPDIR/out" 2>&1 || status=$?
  grep -Eq -- "$4" "$TMPDIR/out" || { echo "$1 $2: no '$4' in:"; cat "$TMPDIR/out"; exit 1; }
  [ "$status" = "$3" ] || { echo "$1 $2: exit status $status, expected $3:"; cat "$TMPDIR/out"; exit 1; }
  echo "$1 $2: ok"
}

job='a rank of a job on GPUs'
expect "$job" '' 0 "$ranks ranks over nccl"
DTENSOR_CHECK_CALLS=1 expect "$job" '' 0 "$ranks ranks over nccl"
expect "$job" kill:1 137 'rank 0\] error: .*rank 1 failed: its process ended'
expect "$job" throw:1 1 'rank 0\] error: .*rank 1 failed: out of cheese'
expect "$job" leave:1 1 'rank 1 has left without calling it'
deadline=5 expect "$job" stall:1 1 'did not complete within 5 s'
expect 'training on the ranks of a job' '' 0 'fully sharded on the host, blocks: as on the host'
