"""The layer of bench/experts.cpp in PyTorch: a router, experts by grouped products, rows by all_to_all.

  torch_experts.py [--tokens 2048] [--dim 256] [--hidden 512] [--experts 8] [--choices 2]     prints the median pass in milliseconds

A process of it is a rank, with its part of the tokens and of the experts; tools/bench starts them. Before it measures, it compares the
layer with one that has all tokens and experts.
"""
import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd
from torch.nn import functional as F


def feed_forward(rows, counts, w1, w2):
    """Rows [rows, dim] sorted by expert, counts of each; w1 [experts, dim, hidden], w2 [experts, hidden, dim]."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(F.gelu(F.grouped_mm(rows, w1, offs=ends)), w2, offs=ends)


def exchanged(rows, received, sent):
    under_way = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
    return under_way.wait() if isinstance(under_way, AsyncCollectiveTensor) else under_way


def on_their_ranks(rows, counts, w1, w2):
    """The rows of this rank's tokens through the experts of all ranks: counts [experts] are of this rank."""
    ranks = dist.get_world_size()
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    by_rank = theirs.view(ranks, -1)
    sent, received = counts.view(ranks, -1).sum(1).tolist(), by_rank.sum(1).tolist()
    arrived = exchanged(rows, received, sent)
    # They come rank by rank, and experts want them expert by expert.
    expert = torch.arange(by_rank.size(1)).repeat(ranks).repeat_interleave(by_rank.reshape(-1))
    order = expert.argsort(stable=True)
    computed = feed_forward(arrived.index_select(0, order), by_rank.sum(0), w1, w2)
    return exchanged(torch.empty_like(computed).index_copy(0, order, computed), sent, received)


def layer(o, x, gate, w1, w2, shared):
    weights, chosen = F.linear(x, gate).softmax(-1).topk(o.choices, -1)
    order = chosen.view(-1).argsort(stable=True)
    tokens = order.div(o.choices, rounding_mode="floor")
    counts = torch.bincount(chosen.view(-1), minlength=o.experts)
    rows = x.index_select(0, tokens)
    computed = on_their_ranks(rows, counts, w1, w2) if shared else feed_forward(rows, counts, w1, w2)
    weighted = computed * weights.view(-1).index_select(0, order).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, weighted)


def check(o, whole, g, leaves, y, part):
    """Throws where the ranks' numbers are not those of one."""
    x, gate, w1, w2 = (t.clone().requires_grad_() for t in whole)
    expected = layer(o, x, gate, w1, w2, shared=False)
    expected.backward(g)
    of_gate = leaves[1].grad.clone()
    dist.all_reduce(of_gate)
    pairs = ((y, part(expected)), (leaves[0].grad, part(x.grad)), (of_gate, gate.grad), (leaves[2].grad, part(w1.grad)),
             (leaves[3].grad, part(w2.grad)))
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def main():
    parser = argparse.ArgumentParser()
    for name, default in dict(tokens=2048, dim=256, hidden=512, experts=8, choices=2, warm_up=2, passes=9).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    o = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def part(t):
        return t.chunk(ranks)[rank]

    whole = (torch.randn(o.tokens, o.dim), torch.randn(o.experts, o.dim) * 0.1, torch.randn(o.experts, o.dim, o.hidden) * 0.02,
             torch.randn(o.experts, o.hidden, o.dim) * 0.02)
    g = torch.randn(o.tokens, o.dim)
    leaves = [t.clone().requires_grad_() for t in (part(whole[0]), whole[1], part(whole[2]), part(whole[3]))]
    own = part(g)
    times = []
    for _ in range(o.warm_up + o.passes):
        for leaf in leaves:
            leaf.grad = None
        dist.barrier()
        start = time.perf_counter()
        y = layer(o, *leaves, shared=ranks > 1)
        y.backward(own)
        dist.barrier()
        times.append(time.perf_counter() - start)
    check(o, whole, g, leaves, y, part)
    if rank == 0:
        print(f"experts ranks {ranks} dim {o.dim}: {statistics.median(times[o.warm_up:]) * 1e3:.2f} ms")
    dist.destroy_process_group()


main()
