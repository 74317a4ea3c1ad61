"""Suites of the modules: pipelines, long sequences, checkpoints, generation, reinforcement learning."""
from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

from .programs import PEERS, Failed, benchmark, benchmarks_at_once, command, on_ranks, outputs, tokens_per_second
from .row import Row
from .setting import Setting, collect

# PyTorch has these. Of two ranks and many microbatches: how many times as fast as one process they can be, by the schedule's makespan.
PIPELINES = {"gpipe": 1.78, "1f1b": 1.78, "interleaved": 1.88, "looped_bfs": 1.88, "interleaved_zb": 1.96, "zbv": 1.96, "dualpipev": 1.92}


def pipeline(s: Setting) -> list[Row]:
    """A training step of a pipeline of two ranks, and pipelines of stages that sleep."""
    rows: dict = {}
    model = ["--layers", "8", "--seq", "128", "--batch", "16", "--microbatches", "8"]

    def ours(mode, dim, *options, copies=1):
        return tokens_per_second(outputs([command([s.build / "examples/gpt_step", mode, "--dim", dim, *model, *options])] * copies))

    for i in range(s.rounds):
        for dim, least in ((256, 1.15), (64, 1.5)):
            one = ["--ranks", "1", "--schedule", "1f1b"]  # with the memory settings of `launch`, which single has not
            alone, both = ours("pp", dim, *one), ours("pp", dim, *one, copies=2)
            for name, limit in PIPELINES.items():
                here = ours("pp", dim, "--ranks", "2", "--schedule", name)
                peer = tokens_per_second([on_ranks("torch_pipeline.py", 2, "step", name, "--dim", str(dim), *model)]) if s.torch else None
                row = Row("pipeline step", f"{name}, width {dim}", "tokens/s", [], [], s.peer(), higher_is_better=True, ratio_at_least=least)
                collect(rows, row, here, peer)
                row = Row("pipeline step, of what the schedule allows", f"{name}, width {dim}", "of the limit", [], here_at_least=0.95)
                collect(rows, row, here / (limit * both))
            collect(rows, Row("pipeline step", f"one process, width {dim}", "tokens/s", [], higher_is_better=True), alone)
        for name, entry in benchmark(s.build / "bench/pipeline").items():
            schedule, ranks, microbatches = name.split("/")[:3]
            peer = None
            if s.torch and schedule in PIPELINES:
                text = on_ranks("torch_pipeline.py", int(ranks), "sleep", schedule, "--microbatches", microbatches, "--steps", "4")
                peer = float(re.search(r": ([\d.]+) ms", text)[1]) / entry["simulated_ms"]
            row = Row("pipeline of stages that sleep", f"{schedule}, {ranks} ranks", "x simulated", [], [], s.peer(), here_at_most=1.05)
            collect(rows, row, entry["ratio"], peer)
        s.progress(f"pipeline: round {i + 1} of {s.rounds}")
    return sorted(rows.values(), key=lambda row: row.group)


def long_context(s: Setting) -> list[Row]:
    """Causal attention, forward and backward: on one device beside libtorch's own, and cut over two ranks."""
    rows: dict = {}

    def milliseconds(case):
        return benchmark(s.build / "bench/long_context", f"--benchmark_filter=^{case}/iterations")

    def peer(what, length, ranks):
        return float(re.search(r": ([\d.]+) ms", on_ranks("torch_context.py", ranks, what, str(length)))[1]) if s.torch else None

    for i in range(s.rounds):
        for length in (2048, 8192):
            names = [f"one/causal/{length}/1", f"libtorch/causal/{length}/1", f"ring/causal/{length}/2"]
            one, libtorch, ring = (next(iter(milliseconds(name).values()))["real_time"] for name in names)
            both = benchmarks_at_once(2, s.build / "bench/long_context", f"--benchmark_filter=^{names[0]}/iterations")
            both = [entry["real_time"] for each in both for entry in each.values()]
            group = "long context"
            collect(rows, Row(group, f"one device, {length} positions", "ms", [], [], "libtorch in C++", ratio_at_least=0.95), one, libtorch)
            row = Row(group, f"ring of two ranks in zigzag order, {length} positions", "ms", [], [], s.peer(), ratio_at_least=1.3)
            collect(rows, row, ring, peer("ring", length, 2))
            row = Row(group, f"ring of two ranks, of what two processes at once do, {length} positions", "of the limit", [], here_at_least=0.9)
            collect(rows, row, sum(both) / len(both) / 2 / ring)
        s.progress(f"long context: round {i + 1} of {s.rounds}")
    return list(rows.values())


# What bench/saving.cpp and its peer print, and how many times as fast as the peer it must be.
SAVING = {"stall first": 4, "stall": None, "save": 1, "load": 1, "load resharded": 2, "save small": 5, "load small": 5}


def saving(s: Setting) -> list[Row]:
    """Checkpoints of 256 MiB and of 10,000 tensors of 1 KiB, on two ranks, in the build folder's file system."""
    rows: dict = {}

    def seconds(text):
        return {what: float(number) for what, number in re.findall(r"^([a-z ]+) ([\d.]+)$", text, re.MULTILINE)}

    for i in range(s.rounds):
        with tempfile.TemporaryDirectory(dir=s.build) as folder:
            launch = [s.build / "tools/dtensor-run", "-n", "2", s.build / "bench/saving", f"{folder}/here", "1"]
            here = seconds(outputs([command(launch)])[0])
            peer = seconds(on_ranks("torch_saving.py", 2, f"{folder}/peer", "1")) if s.torch else {}
        for what, least in SAVING.items():
            row = Row("saving", what, "ms", [], [], s.peer(), ratio_at_least=least)
            collect(rows, row, 1e3 * here[what], 1e3 * peer[what] if peer else None)
        for first in ("", " first"):
            row = Row("saving", f"stall{first}, beside a memcpy", "x memcpy", [], here_at_most=1.2 if first else None)
            collect(rows, row, here[f"stall{first}"] / here[f"memcpy{first}"])
        s.progress(f"saving: round {i + 1} of {s.rounds}")
    return list(rows.values())


def experts(s: Setting) -> list[Row]:
    """A layer of experts, forward and backward: two ranks, which share experts and tokens, beside PyTorch's and beside one rank."""
    rows: dict = {}
    for i in range(s.rounds):
        peer = float(re.search(r": ([\d.]+) ms", on_ranks("torch_experts.py", 2))[1]) if s.torch else None
        for name, entry in benchmark(s.build / "bench/experts").items():
            way = name.split("/")[1]
            row = Row("experts", f"{way}, 2 ranks, a pass", "ms", [], [], s.peer(), ratio_at_least=1.5 if way == "alltoall" else None)
            collect(rows, row, entry["real_time"], peer)
            collect(rows, Row("experts", f"{way}, 2 ranks", "x one rank", [], higher_is_better=True, here_at_least=1.8), entry["ratio"])
            collect(rows, Row("experts", f"{way}, 2 ranks, processor time", "x one rank", [], higher_is_better=True), entry["cpu_ratio"])
        s.progress(f"experts: round {i + 1} of {s.rounds}")
    return list(rows.values())


def llama_cpp(folder: str) -> float | None:
    """Tokens a second of one prompt by llama.cpp; None where it is not installed."""
    model = pathlib.Path(folder) / "model.gguf"
    if not (shutil.which("llama-bench") and model.exists()):
        return None
    words = ["llama-bench", "-m", model, "-p", "0", "-n", "64", "-d", "16", "-t", "1", "-r", "3", "-o", "json"]
    text = outputs([command(words)])[0]
    return max(json.loads(text[text.index("["):])[0]["samples_ts"])


def generation(s: Setting) -> list[Row]:
    """Tokens a second of a Llama of 4.4 million parameters on one core, beside transformers and llama.cpp with its weights."""
    rows: dict = {}

    def add(name, here, peer, peer_name, **least):
        collect(rows, Row("generation", name, "tokens/s", [], [], peer_name, higher_is_better=True, **least), here, peer)

    has_peer = s.torch and importlib.util.find_spec("transformers")
    with tempfile.TemporaryDirectory() as folder:
        if has_peer:
            outputs([command([sys.executable, PEERS / "torch_generate.py", "make", folder])])

        def peer(what, *options):
            words = [sys.executable, PEERS / "torch_generate.py", what, folder, *options]
            return tokens_per_second(outputs([command(words)])) if has_peer else None

        for i in range(s.rounds):
            where = {"DTENSOR_BENCH_MODEL": folder} if has_peer else {}
            here = benchmark(s.build / "bench/generate", **where)
            speed = {name: entry["tokens_per_s"] for name, entry in here.items() if "tokens_per_s" in entry}
            one, many = (speed[f"equal_lengths/batch:{batch}/invariant:0"] for batch in (1, 16))
            fixed, continuous = (speed[f"skewed_lengths/continuous:{mode}"] for mode in (0, 1))
            add("one prompt", one, peer("generate", 1), "transformers", ratio_at_least=3)
            add("one prompt, beside llama.cpp", one, llama_cpp(folder), "llama.cpp, float32", ratio_at_least=1)
            add("16 prompts", many, peer("generate", 16), "transformers", ratio_at_least=1.2)
            add("lognormal lengths, 16 at a time", continuous, peer("continuous"), "transformers, continuous batching", ratio_at_least=1.5)
            add("lognormal lengths, beside static batches", continuous, fixed, "static batches here", ratio_at_least=2)
            add("two ranks share 64 prompts out", speed["groups/ranks:2"], speed["groups/ranks:1"], "one rank", ratio_at_least=1.8)
            both = benchmarks_at_once(2, s.build / "bench/generate", "--benchmark_filter=^groups/ranks:1/", **where)
            row = Row("generation", "two ranks, of what two processes at once do", "of the limit", [], here_at_least=0.95)
            collect(rows, row, speed["groups/ranks:2"] / sum(each["groups/ranks:1"]["tokens_per_s"] for each in both))
            passes = here["second_epoch/guesses:1"]["tokens_per_pass"]
            collect(rows, Row("generation", "tokens a pass of a prompt's second epoch, guessed by its first", "tokens", [], here_at_least=2), passes)
            for length in (512, 4096):
                entry = here[f"decode_attention/{length}"]
                row = Row("generation", f"attention of a step over {length} positions, beside reading them", "x reading", [])
                collect(rows, row, entry["of_memory"])
            s.progress(f"generation: round {i + 1} of {s.rounds}")
    return list(rows.values())


def learning(s: Setting) -> list[Row]:
    """Steps of GRPO a second: 16 prompts of 8 answers of 5 tokens, 0.1 million parameters. DTENSOR_TRL: a folder with TRL's source."""
    rows: dict = {}
    trl = os.environ.get("DTENSOR_TRL") if s.torch else None
    example = ["--task", "sort4", "--prompts", "16", "--epochs", "1", "--max-tokens", "5", "--share-prompts", "--steps", "100", "--quiet"]

    def ours(ranks):
        with tempfile.TemporaryDirectory() as folder:
            outputs([command([s.build / "examples/rl", *example, "--ranks", ranks, "--log", f"{folder}/log"])])
            lines = [json.loads(line) for line in pathlib.Path(f"{folder}/log").read_text().splitlines()]
        steps = [line["timing_s/step"] + line["timing_s/metrics"] for line in lines]
        warm = steps[len(steps) // 4:]
        return len(warm) / sum(warm)

    def theirs(threads):
        script = [sys.executable, PEERS / "torch_grpo.py", trl, "--threads", threads]
        return json.loads(outputs([command(script, OMP_NUM_THREADS=str(threads))])[0].splitlines()[-1])["steps_per_second"]

    for i in range(s.rounds):
        peer = theirs(1) if trl else None
        for cores in (1, 2):
            if trl and cores == 2:
                peer = max(peer, theirs(2))  # which is less where its threads wait for each other
            name = f"a step of GRPO on {cores} core{'s'[:cores - 1]}"
            collect(rows, Row("learning", name, "steps/s", [], [], "TRL", higher_is_better=True, ratio_at_least=5), ours(cores), peer)
        s.progress(f"learning: round {i + 1} of {s.rounds}")
    return list(rows.values())
