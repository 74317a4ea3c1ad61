#!/usr/bin/env bash
# A context that one rank cannot hold: where the address space is limited, one rank fails, and four ranks train with the loss of one that
# is not limited.
set -euo pipefail
export TMPDIR
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
train() {  # ranks, MiB of each ("unlimited": as it is)
  timeout 300 "$DTENSOR_BUILD/tools/dtensor-run" -n "$1" bash -c 'echo $$ >"$TMPDIR/pid"; [ "$1" = unlimited ] || ulimit -v $(($1 << 10)); exec "${@:2}"' bash "$2" \
    "$DTENSOR_BUILD/examples/train" --model llama3-debug --mesh "cp=$1" --seq 2048 --batch 32 --steps 2 >"$TMPDIR/out" 2>&1
}
losses() { sed -n 's/^step.*| loss *\([0-9.]*\).*/\1/p' "$TMPDIR/out" | cut -c1-6; }

# peak RANKS: the MiB of address space that a rank had at most, where nothing is limited; in `most`.
peak() {
  local now
  train "$1" unlimited &
  most=0
  while kill -0 $! 2>/dev/null; do
    now=$(awk '/^VmPeak/ {print int($2 / 1024)}' "/proc/$(cat "$TMPDIR/pid" 2>/dev/null)/status" 2>/dev/null) || now=
    most=$((${now:-0} > most ? now : most))
    sleep 0.05
  done
  wait $!
}

peak 1
one=$most expected=$(losses)
peak 4
# A process can do without some of its address space, so the limit lies well below what one rank had, and above what one of four had.
limit=$(((one + 2 * most) / 3))
echo "one rank takes $one MiB, one of four $most MiB; the losses are" $expected

! train 1 "$limit" || { echo "one rank of $limit MiB trained"; exit 1; }
grep -qi 'alloc' "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }
train 4 "$limit" || { cat "$TMPDIR/out"; exit 1; }
[ "$(losses)" = "$expected" ] || { echo "four ranks of $limit MiB: losses of $(losses)"; exit 1; }
echo "one rank of $limit MiB fails; four train"
