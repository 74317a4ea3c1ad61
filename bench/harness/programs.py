"""Running programs: ours, Google Benchmark's, and the peers', which are started a process for each rank."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / "bench/peers"


class Failed(Exception):
    pass


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


@dataclasses.dataclass
class Command:
    words: list[str]
    environment: dict[str, str]


def command(words: list, **more: str) -> Command:
    return Command([str(word) for word in words], environment(**more))


def processor_time() -> tuple[int, int]:
    """Of all cores since the machine began: what its host took away, and everything."""
    path = pathlib.Path("/proc/stat")
    fields = [int(field) for field in path.read_text().split("\n")[0].split()[1:9]] if path.exists() else [0] * 8
    return fields[7], sum(fields)


def outputs(commands: list[Command], timeout: float = 900) -> list[str]:
    """What they print when they run at once; throws Failed when one of them fails. A run that a virtual machine's host took more than a
    fiftieth of the cores from is made again, three times at most."""
    for attempt in range(3):
        stolen, total = processor_time()
        texts = outputs_of_one_run(commands, timeout)
        stolen, total = (after - before for after, before in zip(processor_time(), (stolen, total)))
        if stolen * 50 <= total:
            break
        again = "once more" if attempt < 2 else "kept all the same"
        print(f"the host took {100 * stolen / total:.0f} % of the cores from {commands[0].words[0]}: {again}", file=sys.stderr)
    return texts


@contextlib.contextmanager
def started(words: list[str], **options):
    """A program that does not outlive the block, nor does what it has started. It stays in this session: where the system shares its cores out
    among sessions (/proc/sys/kernel/sched_autogroup_enabled), two processes of two sessions get twice what two threads of one process do,
    as soon as somebody else wants the cores."""
    process = subprocess.Popen(words, **({"process_group": 0} | options))
    try:
        yield process
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sign)
                process.wait(timeout=5)


@contextlib.contextmanager
def load(per_core: int):
    """So many busy processes for each core, as of other users: each in a session of its own."""
    with contextlib.ExitStack() as stack:
        for _ in range(per_core * os.cpu_count()):
            stack.enter_context(started([sys.executable, "-c", "while True: pass"], start_new_session=True, process_group=None))
        yield


def text_of(file) -> str:
    file.seek(0)
    return file.read()


def outputs_of_one_run(commands: list[Command], timeout: float) -> list[str]:
    with contextlib.ExitStack() as stack:
        runs = []
        for command in commands:
            out, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            try:
                process = stack.enter_context(started(command.words, env=command.environment, stdout=out, stderr=errors))
            except OSError as error:
                raise Failed(f"{error.filename}: {error.strerror}") from error
            runs.append((process, out, errors))
        late = time.monotonic() + timeout
        while any(process.poll() is None for process, _, _ in runs) and not any(process.returncode for process, _, _ in runs):
            if time.monotonic() > late:
                raise Failed(f"{commands[0].words[0]} took over {timeout:.0f} s")
            time.sleep(0.05)
        for process, out, errors in runs:
            if process.returncode:
                said = (text_of(errors) or text_of(out))[-2000:]
                raise Failed(f"{' '.join(process.args)} ended with status {process.returncode}:\n{said}")
        return [text_of(out) for _, out, _ in runs]


def benchmark(program: pathlib.Path, *options: str, launcher: list = (), **more: str) -> dict[str, dict]:
    """Google Benchmark's results by name and arguments: times in the benchmark's own unit, and counters."""
    return benchmarks_at_once(1, program, *options, launcher=launcher, **more)[0]


def benchmarks_at_once(processes: int, program: pathlib.Path, *options: str, launcher: list = (), **more: str) -> list[dict[str, dict]]:
    """The same of each of several processes."""
    texts = outputs([command([*launcher, program, "--benchmark_format=json", *options], **more)] * processes)
    entries = [json.loads(text[text.index("{"):])["benchmarks"] for text in texts]
    return [{entry["name"].split("/min_time")[0].removesuffix("/real_time"): entry for entry in each} for each in entries]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def on_ranks(script: str, ranks: int, *options) -> str:
    """The output of rank 0 of a peer."""
    where = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    words = [sys.executable, PEERS / script, *options]
    return outputs([command(words, RANK=str(rank), LOCAL_RANK=str(rank), **where) for rank in range(ranks)])[0]


def tokens_per_second(texts: list[str]) -> float:
    found = re.search(r"([\d.]+) tok/s", "".join(texts))
    if not found:
        raise Failed(f"no tok/s in: {''.join(texts)[-500:]}")
    return float(found[1])


def torch_version() -> str | None:
    """Of the peer: this python's, if it has a torch with DTensor."""
    script = "import torch, torch.distributed.tensor; print(torch.__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    return done.stdout.strip() if done.returncode == 0 else None
