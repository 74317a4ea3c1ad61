"""What is measured, and what it must reach. A suite runs its programs and the peers' in turns and returns rows."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import re
import shutil
import sys
import tempfile

from .programs import PEERS, Failed, benchmark, command, on_ranks, outputs, tokens_per_second
from .row import Row

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclasses.dataclass
class Setting:
    build: pathlib.Path
    rounds: int
    torch: str | None  # the peer's version
    progress: object
    load: int = 0  # busy processes beside, for each core

    def peer(self) -> str:
        return f"PyTorch {self.torch.split('+')[0]}" if self.torch else ""


def collect(rows: dict, row: Row, here: float, peer: float | None = None) -> None:
    """Adds a round to the row of this name."""
    row = rows.setdefault((row.group, row.name), row)
    row.here.append(here)
    if peer is not None:
        row.peer.append(peer)


def dispatch(s: Setting) -> list[Row]:
    """What a DTensor adds to an operator, in microseconds."""
    rows: dict = {}
    for i in range(s.rounds):
        here = benchmark(s.build / "bench/dispatch", "--benchmark_filter=/2/")
        script = [sys.executable, PEERS / "torch_dispatch.py"]
        peer = json.loads(outputs([command(script)])[0].splitlines()[-1]) if s.torch else {}
        for name, entry in here.items():
            case = name.split("/")[0]
            linear, many = case == "linear_forward_backward", "foreach" in case
            row = Row("dispatch", case, "us", [], [], s.peer(), ratio_at_least=None if many else 12 if linear else 10,
                      here_at_most=None if many else 8 if linear else 0.30)
            theirs = peer[case][1] - peer[case][0] if case in peer else None
            collect(rows, row, entry["overhead_us"], theirs)
        s.progress(f"dispatch: round {i + 1} of {s.rounds}")
    return list(rows.values())


def instructions(s: Setting) -> list[Row]:
    """Instructions that a DTensor adds to an operator, with the plain operator's beside it."""
    if not shutil.which("valgrind"):
        raise Failed("there is no valgrind; on Debian: apt-get install valgrind && touch bench/instructions.cpp")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        outputs([command(["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out",
                        s.build / "bench/instructions"])])
        counts = {}
        for path in pathlib.Path(folder).iterdir():
            text = path.read_text(errors="replace")
            what, total = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.M), re.search(r"^totals: (\d+)", text, re.M)
            if what and total:
                counts[what[1].strip()] = int(total[1]) / 100
    if not counts:
        raise Failed("callgrind counted nothing")
    for name in dict.fromkeys(key.split()[0] for key in counts):
        plain, dtensor = counts[name + " plain"], counts[name + " dtensor"]
        rows.append(Row("instructions", name, "instructions", [dtensor - plain], [plain], "the plain operator"))
    s.progress("instructions: counted")
    return sorted(rows, key=lambda row: row.name)


def mesh_of_one(s: Setting) -> list[Row]:
    """A training step on a mesh of one rank, as a multiple of the plain one."""
    rows: dict = {}
    for i in range(s.rounds):
        for name, entry in benchmark(s.build / "bench/step").items():
            width = re.search(r"dim:(\d+)", name)[1]
            collect(rows, Row("mesh of one", f"GPT step, width {width}", "x plain", [], here_at_most=1.02), entry["ratio"])
        s.progress(f"mesh of one: round {i + 1} of {s.rounds}")
    return list(rows.values())


def recurrent(s: Setting) -> list[Row]:
    """A training step of recurrent layers with default states: how many times as fast as one rank two are, the batch cut."""
    rows: dict = {}
    for i in range(s.rounds):
        for name, entry in benchmark(s.build / "bench/recurrent").items():
            case = name.split("/")[0].replace("_", " ")
            collect(rows, Row("recurrent", f"{case}, 2 ranks", "x one rank", [], higher_is_better=True, here_at_least=1.5), entry["ratio"])
            collect(rows, Row("recurrent", f"{case}, 2 ranks, processor time", "x one rank", [], higher_is_better=True), entry["cpu_ratio"])
            collect(rows, Row("recurrent", f"{case}, gathers", "calls", [], here_at_most=0), entry["gathers"])
        s.progress(f"recurrent: round {i + 1} of {s.rounds}")
    return list(rows.values())


def random(s: Setting) -> list[Row]:
    """normal_ of 16 million elements on one of four ranks, as a multiple of the plain call on the whole."""
    rows: dict = {}
    for i in range(s.rounds):
        for name, entry in benchmark(s.build / "bench/random").items():
            case, counter = name.split("/")[0], "counter:1" in name
            row = Row("random", f"normal_, {case}, {'dt::Generator' if counter else 'mt19937'}", "x plain", [],
                      here_at_most=0.35 if counter else 1.15)
            collect(rows, row, entry["ratio"])
        s.progress(f"random: round {i + 1} of {s.rounds}")
    return list(rows.values())


def size_name(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def collectives_of(s: Setting, group: str, ours, at_1_kb: float, at_16_mb: float) -> list[Row]:
    """`ours(ranks, sizes)`: our times by "all_reduce/bytes:1024"."""
    sizes, rows = [1 << 10, 64 << 10, 1 << 20, 16 << 20], {}
    for i in range(s.rounds):
        for ranks in (2, 4):
            here, peer = ours(ranks, sizes), {}
            if s.torch:
                options = ["--bytes", ",".join(map(str, sizes))]
                peer = json.loads(on_ranks("torch_collectives.py", ranks, *options).splitlines()[-1])
            for size in sizes:
                for kind in KINDS:
                    call = f"{kind}/bytes:{size}"
                    least = {1 << 10: at_1_kb, 16 << 20: at_16_mb}.get(size)
                    row = Row(group, f"{kind}, {ranks} ranks, {size_name(size)}", "us", [], [], f"Gloo in {s.peer()}", ratio_at_least=least)
                    collect(rows, row, here[call], peer.get(call))
            s.progress(f"{group}: round {i + 1} of {s.rounds}, {ranks} ranks")
    return list(rows.values())


def threads(s: Setting) -> list[Row]:
    """Collectives between threads beside Gloo's."""

    def ours(ranks, sizes):
        chosen = f"--benchmark_filter=^threads/.*ranks:{ranks}/bytes:({'|'.join(map(str, sizes))})/"
        found = benchmark(s.build / "bench/collectives", chosen, "--benchmark_min_time=0.1")
        return {name.split("/")[1] + "/" + name.split("/")[3]: entry["real_time"] for name, entry in found.items()}

    return collectives_of(s, "collectives, threads", ours, 8, 4)


def processes(s: Setting) -> list[Row]:
    """Collectives between processes of one host, through memory that they share, beside Gloo's."""

    def ours(ranks, sizes):
        text = outputs([command([s.build / "tools/dtensor-run", "-n", ranks, s.build / "bench/collectives"])])[0]
        found = re.findall(r"^shm/(\w+)/ranks:\d+/(bytes:\d+) best [\d.]+ us, median ([\d.]+) us", text, re.M)
        return {f"{kind}/{size}": float(median) for kind, size, median in found}

    return collectives_of(s, "collectives, processes", ours, 5, 2.5)


def memory_bound(s: Setting) -> list[Row]:
    """Collectives of 64 MB between threads: the share of what the memory would take for their reads and writes."""
    size, rows = 64 << 20, {}
    for i in range(s.rounds):
        bandwidth = next(iter(benchmark(s.build / "bench/memory").values()))["bytes_per_second"]
        here = benchmark(s.build / "bench/collectives", f"--benchmark_filter=^threads/.*bytes:{size}/", "--benchmark_min_time=0.3")
        for ranks in (2, 4):
            # Every rank's input is read, every rank's result is written; an all_gather reads what it writes.
            moved = {"all_reduce": 2 * ranks * size, "all_gather": 2 * ranks * size, "reduce_scatter": (ranks + 1) * size,
                     "all_to_all": 2 * ranks * size}
            for kind in KINDS:
                entry = here[f"threads/{kind}/ranks:{ranks}/bytes:{size}/real_time"]
                row = Row("memory bound", f"{kind}, {ranks} ranks, 64 MB", "of the bound", [], here_at_least=0.7)
                collect(rows, row, moved[kind] / bandwidth / (entry["real_time"] * 1e-6))
        s.progress(f"memory bound: round {i + 1} of {s.rounds}")
    return list(rows.values())


def step(s: Setting) -> list[Row]:
    """The training step of a GPT on two ranks, in tokens per second."""
    least = {("ddp", 256): 1.0, ("fsdp", 256): 1.3, ("tp", 256): 1.65, ("ddp", 64): 1.0, ("fsdp", 64): 1.7, ("tp", 64): 2.3}
    group = "training step"
    if s.load:
        group += f" beside {s.load} busy {'process' if s.load == 1 else 'processes'} for each core"
        least = {key: ratio if key[0] == "ddp" else round(0.8 * ratio, 2) for key, ratio in least.items()}
    names = {"single": "one process", "ddp": "data parallel", "fsdp": "fully sharded", "tp": "tensor parallel"}
    rows: dict = {}

    def ours(mode, dim, batch=8, copies=1):
        words = [s.build / "examples/gpt_step", mode, "--dim", dim, "--batch", batch] + (["--ranks", 2] if mode != "single" else [])
        return tokens_per_second(outputs([command(words) for _ in range(copies)]))

    failed = set()

    def theirs(mode, dim):
        try:
            return tokens_per_second([on_ranks("torch_gpt_step.py", 1 if mode == "single" else 2, mode, "--dim", str(dim))])
        except Failed as error:  # PyTorch 2.6 has no FSDP2 on CPUs
            s.progress(f"the peer's {names[mode]} step is left out: it failed with '{str(error).strip().splitlines()[-1]}'")
            failed.add(mode)
            return None

    for i in range(s.rounds):
        for dim in (256, 64):
            limit = 2 * ours("single", dim, 4, 2)
            for mode, name in names.items():
                here = ours(mode, dim)
                peer = theirs(mode, dim) if s.torch and mode not in failed else None
                row = Row(group, f"{name}, width {dim}", "tokens/s", [], [], s.peer(), higher_is_better=True,
                          ratio_at_least=least.get((mode, dim)))
                collect(rows, row, here, peer)
                if mode == "ddp":
                    row = Row(group, f"data parallel, width {dim}, beside two processes alone", "tokens/s", [], [],
                              "two independent processes here", higher_is_better=True)
                    collect(rows, row, here, limit)
        s.progress(f"{group}: round {i + 1} of {s.rounds}")
    return list(rows.values())


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
            case = [s.build / "bench/long_context", f"--benchmark_filter=^{names[0]}/iterations", "--benchmark_format=json"]
            both = [json.loads(text[text.index("{"):])["benchmarks"][0]["real_time"] for text in outputs([command(case)] * 2)]
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
            here = benchmark(s.build / "bench/generate", **({"DTENSOR_BENCH_MODEL": folder} if has_peer else {}))
            speed = {name.removesuffix("/real_time"): entry["tokens_per_s"] for name, entry in here.items() if "tokens_per_s" in entry}
            one, many = (speed[f"equal_lengths/batch:{batch}/invariant:0"] for batch in (1, 16))
            fixed, continuous = (speed[f"skewed_lengths/continuous:{mode}"] for mode in (0, 1))
            add("one prompt", one, peer("generate", 1), "transformers", ratio_at_least=3)
            add("one prompt, beside llama.cpp", one, llama_cpp(folder), "llama.cpp, float32", ratio_at_least=1)
            add("16 prompts", many, peer("generate", 16), "transformers", ratio_at_least=1.2)
            add("lognormal lengths, 16 at a time", continuous, peer("continuous"), "transformers, continuous batching", ratio_at_least=1.5)
            add("lognormal lengths, beside static batches", continuous, fixed, "static batches here", ratio_at_least=2)
            add("two ranks share 64 prompts out", speed["groups/ranks:2"], speed["groups/ranks:1"], "one rank", ratio_at_least=1.8)
            passes = here["second_epoch/guesses:1/real_time"]["tokens_per_pass"]
            collect(rows, Row("generation", "tokens a pass of a prompt's second epoch, guessed by its first", "tokens", [], here_at_least=2), passes)
            for length in (512, 4096):
                entry = here[f"decode_attention/{length}/real_time"]
                row = Row("generation", f"attention of a step over {length} positions, beside reading them", "x reading", [])
                collect(rows, row, entry["of_memory"])
            s.progress(f"generation: round {i + 1} of {s.rounds}")
    return list(rows.values())


def scale(s: Setting) -> list[Row]:
    """What a rank pays for the size of the world, on the fake transport."""
    rows: dict = {}
    units = {"mesh_us": "us", "layout_us": "us", "plan_us": "us", "first_call_us": "us", "hit_us": "us", "memory_kb": "KB"}
    for i in range(s.rounds):
        for name, entry in benchmark(s.build / "bench/scale").items():
            ranks = name.split("/")[1]
            for counter, unit in units.items():
                what = counter.rsplit("_", 1)[0].replace("_", " ")
                collect(rows, Row("scale", f"{what}, {ranks} ranks", unit, []), entry[counter])
        s.progress(f"scale: round {i + 1} of {s.rounds}")
    return sorted(rows.values(), key=lambda row: list(units).index(next(c for c in units if row.name.startswith(c.rsplit("_", 1)[0].replace("_", " ")))))


def sharding(s: Setting) -> list[Row]:
    """The step by how parameters are sharded, in milliseconds, and what is gathered at once."""
    rows: dict = {}
    for i in range(s.rounds):
        for name, entry in benchmark(s.build / "bench/fsdp").items():
            case = name.split("/")[0]
            collect(rows, Row("sharding", f"step, {case}", "ms", []), entry["real_time"])
            collect(rows, Row("sharding", f"gathered at once, {case}", "MB", []), entry["whole_mb"])
        s.progress(f"sharding: round {i + 1} of {s.rounds}")
    return list(rows.values())


def redistribute(s: Setting) -> list[Row]:
    """Transitions between layouts, on threads."""
    rows: dict = {}
    for i in range(s.rounds):
        for name, entry in benchmark(s.build / "bench/redistribute").items():
            what, ranks, size = re.match(r"(.*)/ranks:(\d+)/bytes:(\d+)", name).groups()
            collect(rows, Row("redistribute", f"{what.replace('->', ' -> ')}, {ranks} ranks, {size_name(int(size))}", "us", []), entry["real_time"])
        s.progress(f"redistribute: round {i + 1} of {s.rounds}")
    return list(rows.values())


SUITES = {suite.__name__: suite for suite in (dispatch, instructions, mesh_of_one, recurrent, threads, processes, memory_bound, step, pipeline, long_context, saving, generation,
                                              sharding, redistribute, random, scale)}
