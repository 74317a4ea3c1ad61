"""What PyTorch's DTensor adds to the operators of bench/dispatch_cases.hpp: prints {case: [plain us, dtensor us]} as JSON.

One process on PyTorch's fake process group of two ranks, one thread, decisions cached; plain and distributed in turns, the fastest of each.
"""
import json
import time
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402: needs the process group
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module  # noqa: E402

TURNS = 20


def microseconds(call, calls):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def compare(plain, distributed, calls):
    microseconds(plain, calls), microseconds(distributed, calls)
    turns = [(microseconds(plain, calls), microseconds(distributed, calls)) for _ in range(TURNS)]
    return [min(times) for times in zip(*turns)]


def main():
    mesh = init_device_mesh("cpu", (2,))
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    A, B, W = (DTensor.from_local(t, mesh, [p]) for t, p in ((a, Shard(0)), (b, Shard(0)), (b, Replicate())))
    results = {}
    with torch.no_grad():
        cases = {
            "add": (lambda: torch.add(a, b), lambda: torch.add(A, B)),
            "mm": (lambda: torch.mm(a, b), lambda: torch.mm(A, W)),
            "relu": (lambda: torch.relu(a), lambda: torch.relu(A)),
            "sum_dim": (lambda: a.sum(1), lambda: A.sum(1)),
            "transpose": (lambda: a.t(), lambda: A.t()),
            "add_": (lambda: a.add_(b), lambda: A.add_(B)),
        }
        for name, (plain, distributed) in cases.items():
            results[name] = compare(plain, distributed, 500)
    linear, Linear = torch.nn.Linear(16, 16), distribute_module(torch.nn.Linear(16, 16), mesh)

    def step(module, x):
        module(x).sum().backward()
        module.zero_grad()

    results["linear_forward_backward"] = compare(lambda: step(linear, a), lambda: step(Linear, A), 50)
    print(json.dumps(results))


main()
