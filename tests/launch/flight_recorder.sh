#!/usr/bin/env bash
# Jobs that go wrong in a known way: the report names the rank, the call with its number, operator and module, and the line of source.
set -euo pipefail
export OMP_NUM_THREADS=1
run=$DTENSOR_BUILD/tools/dtensor-run
program=$DTENSOR_BUILD/tests/flight-ranks
source=tests/launch/flight/program.cpp
line_of() { grep -n "LINE: $1" "$source" | cut -d: -f1; }
call="all_gather #4 of float32\[64\] in group 'dp' by aten::mm for layers.3"
at="program.cpp:$(line_of call) \(in .*step\)"
deadline=2

fail() { echo "$*:"; cat "$TMPDIR/out"; exit 1; }

# job TRANSPORT MODE RANK: runs it, leaves its output, and fails where that took longer to be explained than the deadline and 2 s.
job() {
  local command=("$run" -n 4 --grace 1 "$program" "$2" "$3" --transport "$1" --deadline $deadline) wrong told
  if [ "$1" = threads ]; then command=("$program" "$2" "$3" --ranks 4 --deadline $deadline); fi
  rm -f "$TMPDIR/told" "$TMPDIR/wrong"
  timeout 60 "${command[@]}" 2>&1 | while IFS= read -r text; do
    case $text in
      'goes wrong') echo "$EPOCHREALTIME" >"$TMPDIR/wrong" ;;
      *'flight recorder: '*) [ -s "$TMPDIR/told" ] || echo "$EPOCHREALTIME" >"$TMPDIR/told" ;;
    esac
    printf '%s\n' "$text"
  done >"$TMPDIR/out" || true
  [ -s "$TMPDIR/told" ] || fail "$*: no report in"
  read -r wrong <"$TMPDIR/wrong"
  read -r told <"$TMPDIR/told"
  awk -v job="$1 $2 $3" -v wrong="$wrong" -v told="$told" -v most=$((deadline + 2)) \
    'BEGIN { print job ": told after " told - wrong " s"; exit told - wrong > most }' || fail "$*: too late"
}

# says TEXT...: the output has each, a regular expression.
says() {
  local text
  for text in "$@"; do grep -Eq -- "$text" "$TMPDIR/out" || fail "no '$text' in"; done
}

for transport in threads shm gloo; do
  for rank in 0 1; do
    job $transport missing $rank
    says "flight recorder: rank $rank is behind: it has not made $call at $at, in which ranks .* wait" "rank $rank runs, at program.cpp:[0-9]+ \(in .*stall\)"
    job $transport type $rank
    says "flight recorder: rank $rank made all_reduce\(sum\) #4 of float32\[64\] in group 'dp' by aten::mm for layers.3 at program.cpp:[0-9]+ .* where ranks .* made $call"
    job $transport size $rank
    says "flight recorder: rank $rank made all_gather #4 of float32\[60\] in group 'dp' by aten::mm for layers.3 at program.cpp:[0-9]+ .* where ranks .* made $call"
    job $transport dtype $rank
    says "flight recorder: rank $rank made all_gather #4 of float64\[64\] in group 'dp' by aten::mm for layers.3 at program.cpp:[0-9]+ .* where ranks .* made $call"
    job $transport skip $rank
    says "flight recorder: rank $rank made all_reduce\(sum\) #4 .* for layers.4 at program.cpp:[0-9]+ .* where ranks .* made $call"
  done
done

# A lambda is named after the function that it stands in.
job shm lambda 1
says "rank 1 runs, at program.cpp:$(line_of lambda) \(in main::\{lambda\}\)"

# A process of its own can also end, stop, or leave nothing to read.
behind="it has not made $call at $at, in which ranks .* wait"
for transport in shm gloo; do
  for rank in 0 1; do
    job $transport kill $rank
    says "flight recorder: rank $rank is behind: $behind" "rank $rank was killed by signal 9 \(SIGKILL"
    job $transport stop $rank
    says "flight recorder: rank $rank is behind: $behind" "rank $rank is stopped"
  done
  job $transport segv 1
  says "flight recorder: rank 1 is behind: $behind" "rank 1 was killed by signal 11 .*, at program.cpp:[0-9]+"
  job $transport term 1
  says "flight recorder: rank 1 is behind: $behind" "rank 1 was killed by signal 15 .*, at program.cpp:[0-9]+"
  job $transport incomplete 1
  says "flight recorder: rank 1 is behind: every rank has made all_reduce\(sum\) #4 of float32\[8388608\] in group 'dp' by aten::mm for layers.3 at program.cpp:$(line_of incomplete) .*, which is not complete" "rank 1 is stopped"
  job $transport no-events 1
  says "flight recorder: rank 1 is behind: $behind"
  job $transport no-events-of-another 1
  says "flight recorder: rank 1 is behind: $behind" "rank 3 .*has left no events to read"
done

# On request, of a job that goes on, and from the folder afterwards.
"$run" -n 2 --flight-recorder "$TMPDIR/kept" "$program" missing 1 --deadline 60 >"$TMPDIR/out" 2>&1 &
launcher=$!
for _ in $(seq 100); do [ -e "$TMPDIR/kept/rank-1.events" ] && break; sleep 0.1; done
sleep 1.5
kill -USR1 $launcher
sleep 1.5
says "flight recorder: rank 1 is behind: it has not made $call"
"$run" --report "$TMPDIR/kept" >"$TMPDIR/out"
says "flight recorder: rank 1 is behind: it has not made $call"
kill -TERM $launcher
wait $launcher || true
