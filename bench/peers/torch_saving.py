"""What bench/saving.cpp measures, with PyTorch's distributed checkpoint: python3 torch_saving.py FOLDER ROUNDS, once a rank (RANK, WORLD_SIZE)."""
import logging
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
os.environ["USE_LIBUV"] = "0"  # Debian's is built without

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main():
    folder, rounds = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))

    def slowest(what, took):
        took = torch.tensor([took], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{what} {took.item():.4f}", flush=True)

    def seconds(what, work):
        dist.barrier()
        begin = time.perf_counter()
        work()
        slowest(what, time.perf_counter() - begin)

    def seconds_in_background(first, folder):
        dist.barrier()
        begin = time.perf_counter()
        future = dcp.async_save(large, checkpoint_id=folder)
        stalled = time.perf_counter()
        getattr(future, "upload_completion", future).result()  # before any collective: its thread uses the same process group
        ended = time.perf_counter()
        slowest("stall" + first, stalled - begin)
        slowest("background" + first, ended - stalled)

    def tensors(dim, count, shape, filled):
        return {f"layers.{i}.w": distribute_tensor(torch.full(shape, float(i) if filled else -1.0), mesh, [Shard(dim)]) for i in range(count)}

    def check(state):
        for i, value in enumerate(state.values()):
            assert bool((value.to_local() == float(i)).all())

    large, rows, columns = tensors(0, 16, (1024, 4096), True), tensors(0, 16, (1024, 4096), False), tensors(1, 16, (1024, 4096), False)
    small, again = tensors(0, 10_000, (256,), True), tensors(0, 10_000, (256,), False)
    step = 0
    for r in range(rounds):
        for first in (" first", ""):
            step += 1
            seconds_in_background(first, f"{folder}/async{step}")
        seconds("save", lambda: dcp.save(large, checkpoint_id=f"{folder}/large{r}"))
        seconds("load", lambda: dcp.load(rows, checkpoint_id=f"{folder}/large{r}"))
        seconds("load resharded", lambda: dcp.load(columns, checkpoint_id=f"{folder}/large{r}"))
        check(rows)
        check(columns)
        seconds("save small", lambda: dcp.save(small, checkpoint_id=f"{folder}/small{r}"))
        seconds("load small", lambda: dcp.load(again, checkpoint_id=f"{folder}/small{r}"))
        check(again)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
