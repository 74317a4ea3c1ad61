#!/usr/bin/env bash
# dtensor-schedule prints, draws, converts and checks schedules, and says what is wrong with a file or an option.
set -euo pipefail
schedule=$DTENSOR_BUILD/tools/dtensor-schedule
[ -x "$schedule" ] || { echo "the tool is not built: it needs CLI11"; exit 77; }
fail() { echo "$*"; exit 1; }

expected='rank0: 0F0 0F1 0B0 0F2 0B1 0B2
rank1: 1F0 1B0 1F1 1B1 1F2 1B2
makespan 12 ideal 9 bubble 0.2500 peak [2, 1]'
[ "$("$schedule" 1f1b --ranks 2 --microbatches 3)" = "$expected" ] || fail "1f1b is another: $("$schedule" 1f1b --ranks 2 --microbatches 3)"
last() { "$schedule" "$@" | tail -n 1; }
[ "$(last gpipe --ranks 4 --microbatches 8)" = 'makespan 33 ideal 24 bubble 0.2727 peak [8, 8, 8, 8]' ] || fail gpipe
[ "$(last interleaved --ranks 4 --microbatches 8)" = 'makespan 57 ideal 48 bubble 0.1579 peak [11, 9, 7, 5]' ] || fail interleaved
[ "$(last zb1p --ranks 4 --microbatches 8 --costs 2,2,1)" = 'makespan 49 ideal 40 bubble 0.1837 peak [4, 4, 4, 4]' ] || fail zb1p
[ "$(last ZBVZeroBubble --ranks 4 --microbatches 8)" = 'makespan 51 ideal 48 bubble 0.0588 peak [8, 8, 8, 8]' ] || fail zbv
[ "$(last 1f1b --ranks 4 --microbatches 8 --costs 1,1,1,0.5)" = 'makespan 41 ideal 24 bubble 0.4146 peak [4, 3, 2, 1]' ] || fail "costs of messages"
[ "$(last 1f1b --ranks 2 --microbatches 2 --forward)" = 'makespan 3 ideal 2 bubble 0.3333 peak [1, 1]' ] || fail forward
"$schedule" dualpipev --ranks 4 --microbatches 10 >"$TMPDIR/said"
grep -q '^rank0: .*(0F7;7B3) (7F4;0B0)' "$TMPDIR/said" || fail "no pairs"
"$schedule" automatic --ranks 4 --microbatches 8 --chunks 2 --memory 5 >"$TMPDIR/said"
grep -Eq 'peak \[[1-5], [1-5], [1-5], [1-5]\]$' "$TMPDIR/said" || fail "too many activations"
"$schedule" zbv --ranks 2 --microbatches 4 --details >"$TMPDIR/said"
grep -q '^messages: 8 outputs, 8 gradients$' "$TMPDIR/said" || fail "no details"
"$schedule" --help >"$TMPDIR/said"
for name in gpipe 1f1b interleaved looped_bfs zb1p zb2p interleaved_zb zbv v_half v_min dualpipev automatic; do
  grep -q "^  $name " "$TMPDIR/said" || fail "--help does not name $name"
done

# Files go out and in; the forms with messages, gathering and reducing too.
"$schedule" zbv --ranks 3 --microbatches 5 --csv --messages --gather 2 --reduce >"$TMPDIR/zbv.csv"
grep -q '0SEND_F0,.*0UNSHARD\|0UNSHARD,.*0SEND_F0' "$TMPDIR/zbv.csv" || fail "no messages"
diff <("$schedule" --check "$TMPDIR/zbv.csv") <("$schedule" zbv --ranks 3 --microbatches 5)
diff <("$schedule" --check "$TMPDIR/zbv.csv" --csv) "$TMPDIR/zbv.csv"
"$schedule" v_half --ranks 3 --microbatches 5 --svg "$TMPDIR/v.svg" --trace "$TMPDIR/v.json" >/dev/null
python3 - "$TMPDIR" <<'PYTHON'
import json, sys, xml.dom.minidom
xml.dom.minidom.parse(sys.argv[1] + "/v.svg")
boxes = [event for event in json.load(open(sys.argv[1] + "/v.json"))["traceEvents"] if event["ph"] == "X"]
assert len(boxes) == 3 * 2 * 5 * 3, len(boxes)
assert {event["tid"] for event in boxes} == {0, 1, 2}
PYTHON

# refused STATUS TEXT ARGUMENT...: the exit status, and what the error says.
refused() {
  local status=0
  "$schedule" "${@:3}" >"$TMPDIR/out" 2>"$TMPDIR/err" || status=$?
  [ "$status" = "$1" ] || [ "$1" = any -a "$status" != 0 ] || fail "${*:3}: exit status $status"
  grep -qF -- "$2" "$TMPDIR/err" || grep -qF -- "$2" "$TMPDIR/out" || fail "${*:3}: no '$2' in $(cat "$TMPDIR/err" "$TMPDIR/out")"
}
"$schedule" 1f1b --ranks 2 --microbatches 3 --csv >"$TMPDIR/good.csv"
sed 's/0B1,//' "$TMPDIR/good.csv" >"$TMPDIR/removed.csv"
sed 's/1B0,/1B0,1B0,/' "$TMPDIR/good.csv" >"$TMPDIR/doubled.csv"
sed 's/1F0,1B0/1B0,1F0/' "$TMPDIR/good.csv" >"$TMPDIR/swapped.csv"
sed 's/1F0/1G0/' "$TMPDIR/good.csv" >"$TMPDIR/wrong.csv"
refused 1 'rank 0, 0B1 is missing' --check "$TMPDIR/removed.csv"
refused 1 'rank 1, action 2, 1B0: it comes twice' --check "$TMPDIR/doubled.csv"
refused 1 'rank 1, action 0, 1B0: it comes before 1F0' --check "$TMPDIR/swapped.csv"
refused 1 "row 2, cell 1: '1G0' is no action" --check "$TMPDIR/wrong.csv"
refused 1 'has 2 rows; expected 4' --check "$TMPDIR/good.csv" --ranks 4
refused 1 '0F3 is missing' --check "$TMPDIR/good.csv" --microbatches 4
refused 1 'cannot read' --check "$TMPDIR/none.csv"
refused 1 'cannot write' 1f1b --ranks 2 --microbatches 3 --svg "$TMPDIR/none/a.svg"
refused 1 "there is no schedule 'zb3p'" zb3p --ranks 2 --microbatches 3
refused 1 'zbv has 2 stages on a rank; got 3 chunks' zbv --ranks 2 --microbatches 3 --chunks 3
refused 1 'gpipe holds 8 activations on rank 0' gpipe --ranks 4 --microbatches 8 --memory 6
refused 2 '--ranks is required' gpipe --microbatches 3
refused 2 '--microbatches is required' gpipe --ranks 3
refused 2 'which schedule?'
refused 2 'leave out the NAME' 1f1b --check "$TMPDIR/good.csv"
refused 1 'has 2 stages; expected 2 ranks times 3 chunks' --check "$TMPDIR/good.csv" --chunks 3
: >"$TMPDIR/empty.csv"
refused 1 'is empty; expected a row of actions for each rank' --check "$TMPDIR/empty.csv"
refused 2 'are more than 4194304 forwards' 1f1b --ranks 100000 --microbatches 100000
refused 2 'got 2 costs; expected three or four' 1f1b --ranks 2 --microbatches 3 --costs 1,2
refused any "got 'x'; expected a time, 0 or more" 1f1b --ranks 2 --microbatches 3 --costs 1,x,2
refused any "got 'nan'; expected a time" 1f1b --ranks 2 --microbatches 3 --costs nan,1,1
for option in --ranks=0 --microbatches=-1 --costs=1,2 --costs=1,-2,3 --costs=a,b,c --pigeon; do
  refused any "${option%%=*}" gpipe --ranks 2 --microbatches 2 "$option"
done
