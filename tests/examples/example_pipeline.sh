#!/usr/bin/env bash
# A pipeline trains with the losses and gradients of one device: bit for bit where no other mesh dimension adds in another order.
set -euo pipefail
train() {
  local status=0
  timeout 300 "$@" --model "${model:-llama3-debug}" --compare >"$TMPDIR/out" || status=$?
  [ $status = 0 ] || cat "$TMPDIR/out"
  echo "${*:2} | $(tail -n 2 "$TMPDIR/out" | paste -sd ' ')"
  grep -Fq 'initial parameters: are bit for bit those of one device' "$TMPDIR/out" && return $status
}
threads() { train "$DTENSOR_BUILD/examples/train" "$@"; }
processes() { train "$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$DTENSOR_BUILD/examples/train" --transport "$@"; }
is_equal() { grep -qx 'gradients: bit-equal' "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }; }

for schedule in gpipe 1f1b interleaved zb1p zb2p interleaved_zb zbv v_half v_min dualpipev automatic; do
  threads --ranks 2 --mesh pp=2 --schedule $schedule --microbatches 8 --dropout 0.1 --steps 4 --tolerance 0
  is_equal
done
threads --ranks 4 --mesh pp=4 --schedule 1f1b --microbatches 6 --dropout 0.1 --steps 4 --dtype float64 --tolerance 0
is_equal
for transport in shm gloo; do
  processes $transport --mesh pp=2 --schedule zbv --microbatches 5 --dropout 0.1 --steps 4 --tolerance 0
  is_equal
done
threads --ranks 2 --mesh pp=2 --schedule looped_bfs --microbatches 4 --steps 4 --dtype float64 --tolerance 1e-12
threads --ranks 4 --meshes 'pp=2,dp=2;pp=2,tp=2' --schedule zbv --dropout 0.1 --steps 10 --tolerance 1e-4
threads --ranks 4 --mesh pp=2,tp=2 --sp --schedule 1f1b --steps 10 --tolerance 1e-4
threads --ranks 8 --mesh pp=2,dp=2,tp=2 --sp --schedule zb1p --steps 5 --dtype float64 --tolerance 1e-10

for zero in 1 2 3; do
  threads --ranks 4 --mesh pp=2,dp=2 --fsdp --zero $zero --schedule zbv --steps 10 --tolerance 1e-4
done

# Embeddings that are the head's weights too, on two ranks.
for schedule in 1f1b zb1p zbv; do
  model=gpt2-debug threads --ranks 2 --mesh pp=2 --schedule $schedule --dropout 0.1 --steps 4 --tolerance 0
  is_equal
done
model=gpt2-debug threads --ranks 4 --mesh pp=2,dp=2 --schedule 1f1b --steps 10 --tolerance 1e-4
model=gpt2-debug threads --ranks 4 --mesh pp=2,tp=2 --sp --schedule zb1p --steps 10 --tolerance 1e-4
model=gpt2-debug threads --ranks 4 --mesh pp=2,dp=2 --fsdp --schedule 1f1b --steps 10 --tolerance 1e-4

refuses() {
  if timeout 60 "$DTENSOR_BUILD/examples/train" --model llama3-debug "${@:2}" >"$TMPDIR/out" 2>&1; then echo "accepted: ${*:2}"; exit 1; fi
  grep -Fq -- "$1" "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }
}
refuses 'got 4 pieces for 8 stages' --ranks 4 --mesh pp=4 --schedule zbv
refuses "there is no schedule '1f2b'" --ranks 2 --mesh pp=2 --schedule 1f2b
refuses 'add one, as in --mesh pp=2,dp=2' --ranks 2 --mesh dp=2 --schedule zbv
refuses '32 are more than the 16 of --batch' --ranks 2 --mesh pp=2 --microbatches 32

# A rank that is killed in the middle ends the job, which names it.
killed() {
  timeout 120 "$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$DTENSOR_BUILD/examples/train" --transport "$1" --model llama3-debug --mesh pp=2 \
    --schedule zbv --steps 100000 >"$TMPDIR/out" 2>&1 &
  local run=$! ranks=() status=0
  for _ in {1..300}; do
    mapfile -t ranks < <(pgrep -P "$(pgrep -P $run | head -n 1)" 2>/dev/null)
    [ ${#ranks[@]} = 2 ] && break
    sleep 0.1
  done
  sleep 4
  kill -9 "${ranks[1]}"
  local start=$SECONDS
  wait $run || status=$?
  echo "$1: ended with $status, $((SECONDS - start)) s after a rank was killed"
  [ $status != 0 ] && [ $((SECONDS - start)) -lt 30 ] && grep -Eq 'rank [01].*(SIGKILL|signal 9|[Kk]illed)' "$TMPDIR/out" ||
    { tail -30 "$TMPDIR/out"; exit 1; }
}
killed shm
killed gloo
