#!/usr/bin/env bash
# The program that learns by rewards: the same curve on any ranks and after an interruption, metrics in a file, a picture, and refusals.
set -euo pipefail
rl=$DTENSOR_BUILD/examples/rl out=$TMPDIR
[ -x "$rl" ] || { echo "the examples are not built"; exit 77; }
small="--dtype float64 --dim 32 --prompts 8 --samples 4 --steps 4 --eval-prompts 16"
short() { "$rl" $small "$@"; }
curve() { grep -E '^(step|reward:)' "$1" | sed -E 's/ \| +[0-9]+ ms \| +[0-9]+ tokens.s//'; }

for task in sort4 arithmetic; do
  short --task $task --sft-steps 2 --log "$out/log" --svg "$out/svg" >"$out/one"
  [ "$(grep -c '^step' "$out/one")" = 4 ]
  [ "$(grep -c '"training/global_step"' "$out/log")" = 4 ]
  grep -q '</svg>' "$out/svg"
  tail -1 "$out/one" | grep -Eq '^reward: greedy exact 0\.[0-9]{4} over 16 held-out prompts \(before 0\.[0-9]{4}\)$'
  for mesh in dp=4 dp=2,tp=2 dp=2,cp=2 cp=2,tp=2; do
    short --task $task --sft-steps 2 --mesh $mesh >"$out/ranks"
    diff <(curve "$out/one") <(curve "$out/ranks")
  done
done
short --task sort4 --lr-end 1 >"$out/one"
"$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$rl" $small --task sort4 --lr-end 1 --mesh dp=2 >"$out/processes"
diff <(curve "$out/one") <(curve "$out/processes")

# A run that goes on.
short --task sort4 --lr-end 1 --steps 2 --save "$out/run" --tensorboard "$out/events" >"$out/first"
[ "$(grep -ac 'critic/score/mean' "$out"/events/events.out.tfevents.*)" -ge 1 ]
short --task sort4 --lr-end 1 --save "$out/run" --resume >"$out/second"
diff <(curve "$out/one" | sed -n '3,4p') <(curve "$out/second" | sed -n '1,2p')

# A rank that is killed in the middle: each other one names the role, the method and the step.
for transport in shm gloo; do
  : >"$out/killed"
  "$DTENSOR_BUILD/tools/dtensor-run" -n 3 "$rl" $small --task sort4 --steps 100000 --mesh dp=3 --transport $transport >"$out/killed" 2>&1 &
  launcher=$!
  for _ in {1..600}; do grep -q '^step    3' "$out/killed" && break || sleep 0.1; done
  kill -KILL "$(pgrep -P $launcher | sed -n 2p)"
  status=0
  wait $launcher || status=$?
  [ $status = 137 ]
  named=$(grep -Ec '^error: .*(actor|rollout|judge|trainer)\.[a-z_]+ failed at step [0-9]+: ' "$out/killed")
  [ "$named" = 2 ] || { echo "$named of 2 ranks named what failed:"; cat "$out/killed"; exit 1; }
done

# refuses TEXT OPTION...
refuses() {
  local expected=$1
  shift
  if "$rl" "$@" >"$out/stdout" 2>"$out/stderr"; then echo "it took $*"; exit 1; fi
  grep -Fq -- "$expected" "$out/stderr" || { echo "no '$expected' for $*:"; cat "$out/stderr"; exit 1; }
}
refuses "sort4" --task nosuch
refuses "'samples' is 1" --task sort4 --samples 1
refuses "expected one of" --task sort4 --algorithm nosuch
echo '{"lrr": 1}' >"$out/config.json"
refuses "there is no option 'lrr'" --task sort4 --config "$out/config.json"
