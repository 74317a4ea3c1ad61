#!/usr/bin/env bash
# The trace of a training run on 4 ranks, as threads and as processes: it parses, has all ranks, no negative durations, and what rank 0 communicated
# is what CommDebugMode counts.
set -euo pipefail
export OMP_NUM_THREADS=1
train=$DTENSOR_BUILD/examples/train
options=(--model llama3-debug --mesh dp=2,tp=2 --fsdp --steps 3 --batch 4 --seq 16 --traffic --trace "$TMPDIR/trace.json")

check() {
  python3 - "$TMPDIR/trace.json" "$TMPDIR/out" <<'PYTHON'
import json, re, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
spans = [event for event in events if event["ph"] == "X"]
assert {event["pid"] for event in spans} == {0, 1, 2, 3}, "ranks are missing"
assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans), "negative times"
for rank in range(4):
    kinds = {event["cat"] for event in spans if event["pid"] == rank}
    assert {"operator", "collective", "scope"} <= kinds, (rank, kinds)
    rows = {}
    for event in sorted((e for e in spans if e["pid"] == rank), key=lambda e: (e["ts"], -e["dur"])):
        open_spans = rows.setdefault(event["tid"], [])
        while open_spans and open_spans[-1] <= event["ts"] + 0.0015:
            open_spans.pop()
        assert not open_spans or event["ts"] + event["dur"] <= open_spans[-1] + 0.0015, f"spans of one row cross: {event}"
        open_spans.append(event["ts"] + event["dur"])
collectives = [event for event in spans if event["cat"] == "collective"]
assert not any("unfinished" in event["args"] for event in collectives)
modules = {event["args"]["module"] for event in collectives}
assert any("layers" in module or "blocks" in module for module in modules), modules
# The line of the table: total, count, bytes.
count, size = map(int, re.search(r"^total +(\d+) +(\d+)", open(sys.argv[2]).read(), re.M).groups())
own = [event for event in collectives if event["pid"] == 0]
assert len(own) == count, (len(own), count)
assert sum(event["args"]["bytes"] for event in own) == size, size
# What one step is the other ranks see at the same time, on their clocks.
starts = {rank: min(event["ts"] for event in collectives if event["pid"] == rank) for rank in range(4)}
assert max(starts.values()) - min(starts.values()) < 5e6, starts
print(len(spans), "spans,", count, "collectives of rank 0, modules", sorted(modules)[:4])
PYTHON
}

timeout 300 "$train" "${options[@]}" >"$TMPDIR/out"
check
rm "$TMPDIR/trace.json"
timeout 300 "$DTENSOR_BUILD/tools/dtensor-run" -n 4 "$train" "${options[@]}" >"$TMPDIR/out"
check
