"""Gloo's collectives through torch.distributed: prints {"all_reduce/bytes:1024": microseconds, ...} as JSON, from rank 0.

A process of it is a rank; tools/bench starts them. `bytes` is the size of the input, except for all_gather, where it is that of the result.
Times are medians of batches of calls, one after the other, that every rank begins at once.
"""
import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist

BATCH = 10  # as in bench/collectives.cpp


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=lambda text: [int(part) for part in text.split(",")], required=True)
    o = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, results = dist.get_world_size(), {}
    for size in o.bytes:
        whole, part, out = torch.ones(size // 4), torch.ones(size // 4 // world), torch.empty(size // 4)
        calls = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(out, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_to_all": lambda: dist.all_to_all_single(out, whole),
        }
        for name, call in calls.items():
            times = []
            for _ in range(12 if size < 1 << 22 else 3):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(BATCH):
                    call()
                times.append((time.perf_counter() - start) / BATCH)
            results[f"{name}/bytes:{size}"] = statistics.median(times) * 1e6
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


main()
