#!/usr/bin/env bash
# Saves that are killed, or fail, at calls that they make to the system. Every point: build/tests/crash-points
set -euo pipefail
program=$DTENSOR_BUILD/tests/crash-points run=$DTENSOR_BUILD/tools/dtensor-run
"$program" --every 6
"$program" --every 12 --ranks 3
# One rank of a job is killed: the step before stays, and the next save works.
folder=$TMPDIR/run
"$run" -n 2 "$program" --job "$folder" 1
for rank in 0 1; do
  for at in 1 3 4; do
    status=0
    DTENSOR_CRASH_RANK=$rank DTENSOR_CRASH_AT=$at "$run" -n 2 "$program" --job "$folder" 2 >"$TMPDIR/out" 2>&1 || status=$?
    [ $status = 137 ] || { echo "rank $rank, call $at: exit status $status"; cat "$TMPDIR/out"; exit 1; }
    "$run" -n 2 "$program" --job "$folder" 0 >"$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }
    grep -q 'step 1 of save 1' "$TMPDIR/out" || { echo "rank $rank, call $at:"; cat "$TMPDIR/out"; exit 1; }
  done
done
"$run" -n 2 "$program" --job "$folder" 2
"$run" -n 2 "$program" --job "$folder" 0 | grep 'step 2 of save 2'
