"""PyTorch's own step of the model in examples/gpt_step.cpp: torch_gpt_step.py single | ddp | fsdp | tp

A process of it is a rank; tools/bench starts them. Rank 0 prints what gpt_step prints.
"""
import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (layer(h).view(b, t, -1, d // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.tokens = nn.Embedding(o.vocab, o.dim)
        self.positions = nn.Parameter(torch.zeros(o.seq, o.dim))
        self.blocks = nn.ModuleList(Block(o.dim, o.heads) for _ in range(o.layers))
        self.norm, self.head = nn.LayerNorm(o.dim), nn.Linear(o.dim, o.vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def spread(model, mode, world, device):
    """The model over `world` ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh(device, (world,))
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        columns, rows = "q k v up".split(), "o down".split()
        for block in model.blocks:
            parallelize_module(block, mesh, {**{n: ColwiseParallel() for n in columns}, **{n: RowwiseParallel() for n in rows}})
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["single", "ddp", "fsdp", "tp"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    for name, default in dict(dim=256, layers=4, heads=8, seq=256, batch=8, vocab=512, steps=12).items():
        parser.add_argument("--" + name, type=int, default=default)
    o = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rank, world = GPT(o).to(o.device), 0, 1
    if o.mode != "single":
        dist.init_process_group("nccl" if o.device == "cuda" else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        model = spread(model, o.mode, world, o.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(o.vocab, (o.batch, o.seq + 1), generator=torch.Generator().manual_seed(1)).to(o.device)
    if o.mode in ("ddp", "fsdp"):
        batch = batch.chunk(world)[rank]
    times = []
    for _ in range(o.steps):
        start = time.perf_counter()
        loss = F.cross_entropy(model(batch[:, :-1]).reshape(-1, o.vocab), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if o.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = statistics.median(times[3:])
    if rank == 0:
        print(f"{o.mode} ranks {world} dim {o.dim}: median step {median * 1e3:.1f} ms, {o.batch * o.seq / median:.0f} tok/s, loss {loss.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
