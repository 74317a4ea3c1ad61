#!/usr/bin/env bash
# The step that is timed beside PyTorch's has one device's loss however ranks share the work, over both transports.
set -euo pipefail
step() { timeout 120 "$DTENSOR_BUILD/examples/gpt_step" "$@" --dim 32 --layers 2 --seq 32 --vocab 64 --steps 4; }
expected=$(step single | tee /dev/stderr | sed 's/.*loss //')
for transport in threads gloo; do
  for mode in ddp fsdp tp; do
    got=$(step $mode --ranks 2 --transport $transport | tee /dev/stderr | sed 's/.*loss //')
    [ "$got" = "$expected" ] || { echo "$mode over $transport: loss $got, one device: $expected"; exit 1; }
  done
done

expected=$(step single --microbatches 4 | tee /dev/stderr | sed 's/.*loss //')
for schedule in 1f1b zb1p; do
  got=$(step pp --ranks 2 --schedule $schedule --microbatches 4 | tee /dev/stderr | sed 's/.*loss //')
  [ "$got" = "$expected" ] || { echo "$schedule: loss $got, one device: $expected"; exit 1; }
done
if step pp --ranks 2 --microbatches 16 2>"$TMPDIR/error"; then exit 1; fi
grep -Fq 'a batch of 8 has no 16 microbatches' "$TMPDIR/error"
