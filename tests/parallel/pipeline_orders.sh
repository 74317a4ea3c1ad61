#!/usr/bin/env bash
# Our schedules are those of PyTorch 2.14, action for action, also with what it sends, gathers and reduces; and each reads the other's files. Its
# execution is what counts for GPipe and 1F1B, whose lists it does not use (and that of 1F1B is off by one on the last rank).
set -euo pipefail
schedule=$DTENSOR_BUILD/tools/dtensor-schedule
[ -x "$schedule" ] || { echo "dtensor-schedule is not built: it needs CLI11"; exit 77; }
python3 -c 'from torch.distributed.pipelining.schedules import ScheduleDualPipeV' 2>/dev/null || { echo "python3 has no PyTorch with DualPipeV (2.9 or later)"; exit 77; }

python3 - "$schedule" <<'PYTHON'
import subprocess, sys, tempfile
import torch.distributed.pipelining.schedules as peer
from torch.distributed.pipelining.stage import _PipelineStageBase

TOOL = sys.argv[1]
NAMES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS", "zb1p": "InterleavedZeroBubble",
         "interleaved_zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}


class Stage(_PipelineStageBase):
    """Computes nothing, and notes what it would."""
    def __init__(self, index, ranks, rank, stages):
        self.submod, self.group, self.group_size, self.group_rank = None, None, ranks, rank
        self.stage_index, self.num_stages, self.has_backward, self.ran = index, stages, True, []
        self.stage_index_to_group_rank = {s: s % ranks for s in range(stages)}

    def _create_grad_recv_info(self, *args): pass
    def _prepare_forward_infra(self, *args, **kwargs): pass
    def _prepare_backward_infra(self, *args, **kwargs): pass
    def get_fwd_recv_ops(self, *args): return []
    get_bwd_recv_ops = get_fwd_send_ops = get_bwd_send_ops = get_fwd_recv_ops
    def perform_reduce_grad(self, *args): pass
    def forward_one_chunk(self, microbatch, *args, **kwargs): self.ran.append(f"{self.stage_index}F{microbatch}")
    def backward_one_chunk(self, microbatch, *args, **kwargs): self.ran.append(f"{self.stage_index}B{microbatch}")


def executed(name, ranks, microbatches):
    rows = []
    for rank in range(ranks):
        stage = Stage(rank, ranks, rank, ranks)
        runs = peer.get_schedule_class(name)(stage, microbatches)
        runs._initialize_stage = lambda *args: None
        runs._check_inputs = lambda *args: ([()] * microbatches, [{}] * microbatches)
        runs._maybe_compute_loss = runs._maybe_get_loss = runs._update_losses = lambda *args, **kwargs: None
        runs._step_microbatches()
        rows.append(stage.ran)
    return rows


def listed(name, ranks, microbatches, chunks):
    stages = [Stage(chunk * ranks, ranks, 0, ranks * chunks) for chunk in range(chunks)]
    return peer.get_schedule_class(name)(stages, microbatches)


def tool(*arguments):
    result = subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, (arguments, result.stderr)
    return [row.split(",") for row in result.stdout.splitlines()]


def words(rows):
    return [[str(action) for action in row if action is not None] for row in rows]


def sorted_resharding(rows):
    """What PyTorch frees at one time comes in the order of a set: sorted."""
    result = []
    for row in rows:
        out, held = [], []
        for word in row:
            if word.endswith("RESHARD"):
                held.append(word)
                continue
            out += sorted(held) + [word]
            held = []
        result.append(out + sorted(held))
    return result


counts = {}
for ours, theirs in NAMES.items():
    single = ours in ("gpipe", "1f1b", "zb1p")
    for chunks in [1] if single else [2] if ours in ("zbv", "dualpipev") else [1, 2, 3]:
        for ranks in [1, 2, 3, 4, 8]:
            for microbatches in sorted({1, 3, ranks, ranks + 1, 2 * ranks, 2 * ranks + 2}):
                sizes = ["--ranks", ranks, "--microbatches", microbatches, *([] if single else ["--chunks", chunks])]
                if ours in ("gpipe", "1f1b"):
                    if ours == "1f1b" and microbatches < ranks:  # which PyTorch refuses
                        continue
                    expected = executed(theirs, ranks, microbatches)
                    assert tool(ours, *sizes, "--csv") == expected, (ours, sizes)
                    counts[ours] = counts.get(ours, 0) + 1
                    continue
                try:
                    built = listed(theirs, ranks, microbatches, chunks)
                except ValueError:  # microbatches that do not divide, or too few of them
                    continue
                assert tool(ours, *sizes, "--csv") == words(built.pipeline_order.values()), (ours, sizes)
                lowered = tool(ours, *sizes, "--csv", "--messages", "--gather", 3, "--reduce")
                theirs_lowered = words(built.pipeline_order_with_comms.values())
                assert sorted_resharding(lowered) == sorted_resharding(theirs_lowered), (ours, sizes)
                counts[ours] = counts.get(ours, 0) + 1
                if ranks == 4:  # files, both ways
                    for form, options in [("compute_only", []), ("compute_comms", ["--messages"]), ("compute_comms", ["--messages", "--gather", 3])]:
                        with tempfile.NamedTemporaryFile("w+", suffix=".csv") as file:
                            built._dump_csv(file.name, form)
                            tool("--check", file.name)
                            file.seek(0)
                            file.truncate()
                            file.write("\n".join(",".join(row) for row in tool(ours, *sizes, "--csv", *options)) + "\n")
                            file.flush()
                            again = listed(theirs, ranks, microbatches, chunks)
                            again._load_csv(file.name, form)
                            if options == ["--messages"] and ours != "dualpipev":  # its simulator knows nothing else
                                again._simulate()
for name, count in counts.items():
    print(f"{name}: {count} sizes, equal to PyTorch's {NAMES[name]}")
assert len(counts) == len(NAMES)
PYTHON
