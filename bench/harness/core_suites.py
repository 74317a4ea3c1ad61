"""Suites of the core: operators, collectives, redistribution, random numbers, the training step."""
from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
import tempfile

from .programs import PEERS, Failed, benchmark, command, on_ranks, outputs, tokens_per_second
from .row import Row
from .setting import Setting, collect

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


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
                entry = here[f"threads/{kind}/ranks:{ranks}/bytes:{size}"]
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
