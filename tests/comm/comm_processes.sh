#!/usr/bin/env bash
# Jobs of processes under dtensor-run: one rank dies, throws, leaves, stalls or diverges; the others say so, dtensor-run
# names the culprit, and nothing is left behind.
set -euo pipefail
run=$DTENSOR_BUILD/tools/dtensor-run
program=("$DTENSOR_BUILD/tests/dtensor-tests" "a rank of a job of processes")

# expect MODE STATUS TEXT...: the job of three ranks ends with STATUS within a minute and prints every TEXT.
expect() {
  local mode=$1 wanted=$2 status=0 text
  shift 2
  DTENSOR_DEADLINE=${deadline:-60} DTENSOR_TEST_MODE=$mode timeout 60 "$run" -n 3 --prefix-output "${program[@]}" >"$TMPDIR/out" 2>&1 || status=$?
  for text in "$@"; do
    grep -Eq -- "$text" "$TMPDIR/out" || { echo "$mode: no '$text' in:"; cat "$TMPDIR/out"; exit 1; }
  done
  [ "$status" = "$wanted" ] || { echo "$mode: exit status $status, expected $wanted:"; cat "$TMPDIR/out"; exit 1; }
}

expect none 0 'rank 0\] 3 ranks over (shm|nccl)'
# Where there is less room than the ranks want to share, or than a group needs, they go on without.
(ulimit -f 64; expect none 0 'rank 0\] 3 ranks over gloo')
(ulimit -f 256; expect none 0 'rank 0\] 3 ranks over (shm|nccl)')
ls /dev/shm >"$TMPDIR/before"
# killed_in MODE CALL: rank 1 dies in the middle of a long call.
killed_in() {
  SECONDS=0
  expect "$1:1" 137 'dtensor-run: rank 1 was killed' "rank 0\] error: .*$2 #[4-6] .* rank 1 failed: its process ended" \
    "rank 2\] error: .*$2 #[4-6] .* rank 1 failed: its process ended"
  [ $SECONDS -lt 20 ] || { echo "the others took $SECONDS s to notice"; exit 1; }
}
killed_in kill-midway 'all_reduce\(sum\)'
killed_in kill-exchanging all_to_all
# What is new there is of jobs that others run at this time, and goes when they end.
for left in $(comm -13 "$TMPDIR/before" <(ls /dev/shm)); do
  for _ in {1..600}; do [ -e "/dev/shm/$left" ] || continue 2; sleep 0.1; done
  echo "/dev/shm/$left is left"
  exit 1
done
for transport in shm gloo; do
  export DTENSOR_TEST_TRANSPORT=$transport
  expect none 0 "rank 0\] 3 ranks over $transport"
  for mode in kill:0 kill:2 exit:1 throw:0 throw:1; do
    rank=${mode#*:}
    read -r first second <<<"$(echo 0 1 2 | tr -d "$rank")"
    case $mode in
      kill:*) status=137 death='was killed by signal 9 \(SIGKILL' why='its process ended' ;;
      exit:*) status=3 death='exited with status 3 without an error of dt::launch' why='its process ended' ;;
      throw:*) status=1 death='exited with status 1' why='out of cheese' ;;
    esac
    [[ $mode == throw:* ]] && own="rank $rank\] error: out of cheese \(rank $rank\)\$" || own=
    expect "$mode" $status "dtensor-run: rank $rank $death" "rank $first\] error: .*all_reduce\(sum\) #[34].* rank $rank failed: $why" \
      "rank $second\] error: .*all_reduce\(sum\) #[34].* rank $rank failed: $why" "$own"
  done
  expect leave:1 1 'rank 1 has left without calling it'
  expect diverge:1 1 'rank 1 called barrier #4|rank 1 called all_reduce' 'rank [02] called all_reduce\(sum\) #4'
  deadline=2 expect stall:1 1 'did not complete within 2 s; rank 1 did not call it'
done
# A program that seeds nothing.
for transport in shm gloo; do
  DTENSOR_TEST_TRANSPORT=$transport timeout 60 "$run" -n 3 "${program[0]}" "launch: ranks that seed nothing have one seed" >"$TMPDIR/out" 2>&1 &&
    grep -q '^3 ranks drew' "$TMPDIR/out" || { echo "no common seed over $transport:"; cat "$TMPDIR/out"; exit 1; }
done
unset DTENSOR_TEST_TRANSPORT

# alive PID: it runs; a zombie that nobody has reaped yet does not.
alive() { [ -e "/proc/$1/stat" ] && ! grep -q ') Z ' "/proc/$1/stat"; }

# Signals reach the ranks; ranks that ignore SIGTERM are killed.
status=0
timeout -s TERM 2 "$run" -n 2 --grace 1 bash -c 'trap "" TERM; echo $$ >>"$0"; while :; do sleep 0.1; done' "$TMPDIR/pids" || status=$?
for pid in $(cat "$TMPDIR/pids"); do
  ! alive "$pid" || { echo "process $pid is left"; exit 1; }
done
# What cannot be written ends nothing: the status is that of the rank.
status=0
"$run" -n 2 sh -c 'exit 3' 2>/dev/full || status=$?
[ $status = 3 ] || { echo "without room for its errors: exit status $status"; exit 1; }
# Ranks that never stop writing, faster than somebody reads, do not keep signals waiting.
status=0
timeout -k 20 -s INT 1 "$run" -n 2 --prefix-output yes > >(while read -r _; do :; done) 2>&1 || status=$?
[ $status = 124 ] || { echo "SIGINT to a job that writes: exit status $status"; exit 1; }
# A killed launcher leaves no orphans.
"$run" -n 2 bash -c 'echo $$ >>"$0"; exec sleep 100' "$TMPDIR/orphans" &
launcher=$!
for _ in $(seq 50); do [ "$(cat "$TMPDIR/orphans" 2>/dev/null | wc -l)" = 2 ] && break; sleep 0.1; done
kill -9 $launcher
wait $launcher 2>/dev/null || true
sleep 0.5
for pid in $(cat "$TMPDIR/orphans"); do
  ! alive "$pid" || { echo "orphan $pid is left"; exit 1; }
done

# refuse TEXT COMMAND...: the command fails and prints TEXT.
refuse() {
  local text=$1
  shift
  if timeout 60 "$@" >"$TMPDIR/out" 2>&1 || ! grep -q -- "$text" "$TMPDIR/out"; then
    echo "expected a failure with '$text' from: $*"
    cat "$TMPDIR/out"
    exit 1
  fi
}
refuse 'cannot run /nonexistent/program' "$run" -n 2 /nonexistent/program
refuse 'not in range' "$run" -n 0 true
refuse 'no PROGRAM' "$run" -n 2
refuse 'need --master-addr' "$run" -n 1 --nnodes 2 true
refuse 'unknown option --pigeon' "$run" -n 1 --pigeon true
refuse 'MASTER_ADDR is not set' env -u MASTER_ADDR RANK=0 WORLD_SIZE=2 "${program[@]}"
# The first rank to say that it failed is named, with its own status, also where it ends long after another.
status=0
"$run" -n 2 bash -c 'if [ "$RANK" = 1 ]; then printf "\1\0\0\0" >&"$DTENSOR_REPORT_FD"; sleep 3; exit 5; fi
  sleep 0.5; printf "\0\0\0\0" >&"$DTENSOR_REPORT_FD"; exit 4' 2>"$TMPDIR/out" || status=$?
[ $status = 5 ] && grep -q 'rank 1 exited with status 5' "$TMPDIR/out" || { echo "a slow end: exit status $status"; cat "$TMPDIR/out"; exit 1; }
# Each rank is a session: where cores are shared out among sessions it has as much of them as any other process.
"$run" -n 2 sh -c 'read -r _ _ _ _ _ session _ </proc/$$/stat && [ "$session" = $$ ]'
"$run" -n 2 --log-dir "$TMPDIR/logs" sh -c 'echo "I am $RANK of $WORLD_SIZE"'
grep -q 'I am 1 of 2' "$TMPDIR/logs/rank-1.log"
