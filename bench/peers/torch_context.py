"""PyTorch's ring attention, by its templates with the kernel for CPUs: its context_parallel itself does not run on CPUs. A causal mask and its
balanced order, the inputs of bench/long_context.cpp.

  torch_context.py ring 2048        prints the shortest forward and backward pass in milliseconds, by the faster of its two rotations
  torch_context.py alone 2048       scaled_dot_product_attention on one device

A process of it is a rank; tools/bench starts them.
"""
import argparse
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

aten = torch.ops.aten


def backward_kernel(*, grad_out, query, key, value, out, logsumexp, is_causal, dropout_p=0.0, scale=None):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
                                                                            scale=scale)


def shortest(run, passes):
    run()
    times = []
    for _ in range(passes):
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def alone(inputs, grad):
    leaves = [x.clone().requires_grad_() for x in inputs]

    def run():
        for leaf in leaves:
            leaf.grad = None
        F.scaled_dot_product_attention(*leaves, is_causal=True).backward(grad)

    return run


def ring(inputs, grad, rotation):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as templates

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = init_device_mesh("cpu", (ranks,)).get_group()
    templates._cp_options.enable_load_balance = True
    templates._cp_options.rotate_method = rotation(templates._RotateMethod)
    chunk = grad.size(2) // (2 * ranks)
    last = 2 * ranks - 1 - rank
    own = torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(last * chunk, (last + 1) * chunk)])
    q, k, v, grad = [x[:, :, own].contiguous() for x in (*inputs, grad)]

    def run():
        out, lse = templates._templated_ring_attention(group, 2, aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v,
                                                       is_causal=True, dropout_p=0.0)[:2]
        templates._templated_ring_attention_backward(group, 2, backward_kernel, grad, "grad_out", q, k, v, out, lse, True)

    return run


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ring", "alone"])
    parser.add_argument("length", type=int)
    parser.add_argument("--passes", type=int, default=3)
    o = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    *inputs, grad = [torch.randn(1, 8, o.length, 64) for _ in range(4)]
    if o.what == "alone":
        took = shortest(alone(inputs, grad), o.passes)
    else:
        rotations = [lambda methods: methods.ALL_GATHER, lambda methods: methods.ALL_TO_ALL]
        took = min(shortest(ring(inputs, grad, rotation), o.passes) for rotation in rotations)
    if dist.get_rank() == 0:
        print(f"{o.what} {o.length}: {took:.1f} ms")
    dist.destroy_process_group()


main()
