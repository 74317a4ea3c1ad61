"""PyTorch's pipelines: the step of the model in examples/gpt_step.cpp, and stages that sleep, as in bench/pipeline.cpp.

  torch_pipeline.py step zbv [--dim 256] [--microbatches 8] [--fused]     prints what gpt_step prints
  torch_pipeline.py sleep zbv --microbatches 8                            prints the shortest step in milliseconds

A process of it is a rank; tools/bench starts them. Schedules go by our names.
"""
import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

from torch_gpt_step import GPT

# PyTorch's name, stages of a rank, and how they lie.
SCHEDULES = {"gpipe": ("GPipe", 1, "loop"), "1f1b": ("1F1B", 1, "loop"), "interleaved": ("Interleaved1F1B", 2, "loop"),
             "looped_bfs": ("LoopedBFS", 2, "loop"), "interleaved_zb": ("InterleavedZeroBubble", 2, "loop"), "zbv": ("ZBVZeroBubble", 2, "v"),
             "dualpipev": ("DualPipeV", 2, "v")}
NAP, AWAKE = 4e-3, 2e-4


def nap():
    """As bench/pipeline.cpp sleeps."""
    end = time.perf_counter() + NAP
    time.sleep(NAP - AWAKE)
    while time.perf_counter() < end:
        pass


class Part(nn.Module):
    """The blocks [first, last) of a GPT, with its embedding before the first and its head after the last."""

    def __init__(self, gpt, first, last):
        super().__init__()
        self.blocks = nn.ModuleList(gpt.blocks[first:last])
        self.begins, self.ends = first == 0, last == len(gpt.blocks)
        if self.begins:
            self.tokens, self.positions = gpt.tokens, gpt.positions
        if self.ends:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x):
        if self.begins:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.ends else x


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        nap()
        return gradient


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 16))

    def forward(self, x):
        nap()
        return (Sleeps.apply(x) if x.requires_grad else x) + Sleeps.apply(self.weight)


def steps_of(o, parts, loss, inputs, targets):
    """Seconds of each step, and the last loss on the rank that has it."""
    name, chunks, style = SCHEDULES[o.schedule]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = generate_rank_to_stage_mapping(ranks, ranks * chunks, style)[rank]
    stages = [PipelineStage(parts(i, ranks * chunks), i, ranks * chunks, torch.device("cpu")) for i in mine]
    schedule = get_schedule_class(name)(stages[0] if chunks == 1 else stages, o.microbatches, loss_fn=loss)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=o.fused) if o.what == "step" else None
    last = ranks * chunks - 1 in mine
    times, losses = [], []
    for _ in range(o.steps):
        dist.barrier()
        start = time.perf_counter()
        if optimizer:
            optimizer.zero_grad()
        losses = []
        schedule.step(*((inputs,) if 0 in mine else ()), **(dict(target=targets, losses=losses) if last else {}))
        if optimizer:
            optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return times, sum(loss.item() for loss in losses) / o.microbatches if last else float("nan")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["step", "sleep"])
    parser.add_argument("schedule", choices=SCHEDULES)
    for name, default in dict(dim=256, layers=8, heads=8, seq=128, batch=16, vocab=512, steps=10, microbatches=8).items():
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--fused", action="store_true", help="take steps by PyTorch's fused AdamW")
    o = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    if o.what == "step":
        gpt = GPT(o)
        batch = torch.randint(o.vocab, (o.batch, o.seq + 1), generator=torch.Generator().manual_seed(1))
        times, loss = steps_of(o, lambda i, n: Part(gpt, i * o.layers // n, (i + 1) * o.layers // n),
                               lambda y, target: F.cross_entropy(y.reshape(-1, o.vocab), target.reshape(-1)),
                               batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        median = statistics.median(times[3:])
        text = f"median step {median * 1e3:.1f} ms, {o.batch * o.seq / median:.0f} tok/s, loss {loss:.4f}"
    else:
        rows = 4 * o.microbatches
        times, _ = steps_of(o, lambda i, n: Sleeper(), lambda y, target: (y * target).sum(), torch.ones(rows, 16), torch.ones(rows, 16))
        text = f"{min(times[1:]) * 1e3:.1f} ms"
    if dist.get_rank() == 0:
        print(f"pp {o.schedule} ranks {dist.get_world_size()} dim {o.dim}: {text}")
    dist.destroy_process_group()


main()
