#!/usr/bin/env bash
# Dry runs: a rank of a mesh, and a rank of each stage of a pipeline, whose parameters add up to those of the model.
set -euo pipefail
dry() { timeout 250 "$DTENSOR_BUILD/examples/dry_run" "$@" >"$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }; }

dry --model llama3-debug --mesh dp=4,tp=2 --fsdp --sp --seq 64
grep -Eq '^dp +reduce_scatter +[1-9]' "$TMPDIR/out" && grep -Eq '^tp +all_gather +[1-9]' "$TMPDIR/out"

# Experts are said to be equally busy. Of 2 layers: rows go to them and back, forward and backward.
dry --model mixtral-debug --mesh dp=2,ep=4 --fsdp --seq 64
grep -Eq '^ep +all_to_all +8 ' "$TMPDIR/out" && grep -Eq '^ep +all_gather +[1-9]' "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }
dry --model mixtral-8x22b --mesh dp=16,ep=8,tp=4 --fsdp --sp
dry --model deepseek-v3 --mesh ep=64,tp=2 --sp --seq 512

# The parameters of all stages, and the peaks, in tenths of a MiB.
parameters() { awk '$1 ~ /^[0-9]+$/ { sum += 10 * $(NF - 2) } END { print sum }' "$TMPDIR/out"; }
dry --model gpt2 --mesh pp=1 --seq 64 --microbatches 8
whole=$(parameters)
[ "$whole" -gt 4000 ]
for schedule in 1f1b interleaved zbv; do
  dry --model gpt2 --mesh pp=4,dp=2 --seq 64 --microbatches 8 --schedule $schedule --rank 3
  cat "$TMPDIR/out"
  split=$(parameters)
  [ $((split - whole)) -le 4 ] && [ $((whole - split)) -le 4 ] || { echo "the stages have $split, the model $whole tenths of a MiB"; exit 1; }
  grep -Eq '^timeline.* bubble 0\.' "$TMPDIR/out"
  grep -Eq '^pp +send +[1-9]' "$TMPDIR/out"
done
# Under 1F1B a later stage holds fewer microbatches.
dry --model llama3-debug --mesh pp=4,tp=2 --sp --seq 256 --batch 4 --microbatches 16
peaks=$(awk '$1 ~ /^[12]$/ { print 10 * $NF }' "$TMPDIR/out" | paste -sd ' ')
[ "${peaks% *}" -gt "${peaks#* }" ] || { cat "$TMPDIR/out"; exit 1; }

refuse() {
  if timeout 60 "$DTENSOR_BUILD/examples/dry_run" "${@:2}" >"$TMPDIR/out" 2>&1 || ! grep -Fq -- "$1" "$TMPDIR/out"; then
    echo "not refused with '$1': ${*:2}"
    cat "$TMPDIR/out"
    exit 1
  fi
}
refuse 'add pp to the mesh' --mesh dp=2 --schedule zbv
refuse "there is no schedule '1f2b'" --mesh pp=2 --schedule 1f2b
refuse 'pieces for 64 stages' --model llama3-debug --mesh pp=64
refuse 'got rank 8 of 8' --mesh dp=4,tp=2 --rank 8
