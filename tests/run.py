#!/usr/bin/env python3
"""Runs the tests of a build folder and counts them: tests/run.py [--sanitized] BUILD [PATTERN]. See tools/test --help.

A test is a test case of dtensor-tests, a public header, a consumer of the installed library or a script. Test cases run
in groups, a process each; one that crashes or hangs fails alone, and the rest of its group runs in another process.
"""
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

CASES_PER_PROCESS = 12
CASE_SECONDS, SLOW_CASE_SECONDS, SCRIPT_SECONDS = 180, 600, 1800
SANITIZED_SECONDS = 1800  # of a case
SKIPPED = 77

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Tally:
    """Counts outcomes and prints failures as they come."""

    def __init__(self, total):
        self.total, self.passed, self.failed, self.skipped = total, 0, [], []
        self.lock, self.printed = threading.Lock(), time.monotonic()
        self.seconds = {}  # that a script took, or a process of test cases

    def took(self, name, since):
        with self.lock:
            self.seconds[name] = time.monotonic() - since

    def add(self, outcome, name, text=""):
        with self.lock:
            if outcome == "pass":
                self.passed += 1
            elif outcome == "skip":
                self.skipped.append((name, text))
            else:
                self.failed.append(name)
                print(f"FAILED {name}" + (f": {text}" if text else ""), flush=True)
            done = self.passed + len(self.failed) + len(self.skipped)
            if done == self.total or time.monotonic() - self.printed > 5:
                self.printed = time.monotonic()
                print(f"[{done}/{self.total}] {len(self.failed)} failed", flush=True)

    def output(self, text):
        with self.lock:
            print(text.strip() or "(it printed nothing)", flush=True)

    def finish(self):
        slowest = sorted(self.seconds.items(), key=lambda item: -item[1])[:8]
        print("slowest: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in slowest))
        for name, why in self.skipped:
            print(f"skipped {name}: {why}")
        for name in self.failed:
            print(f"failed {name}")
        print(f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped")
        return 1 if self.failed or self.passed == 0 else 0


def kill_group(process):
    """Ends a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def ending(status):
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def read_events(path):
    """What dtensor-tests wrote so far: [(what, name, more)]. A line that is being written is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [tuple(line.split("\t", 2)) for line in lines]


def wait_for_cases(process, events_file):
    """Waits for the process; a case that takes too long ends it. Returns what to say of the case that was running."""
    usual, slow = (SANITIZED_SECONDS,) * 2 if "--sanitized" in sys.argv else (CASE_SECONDS, SLOW_CASE_SECONDS)
    seen, since, limit = 0, time.monotonic(), usual
    while process.poll() is None:
        time.sleep(0.05)
        events = read_events(events_file)
        if len(events) > seen:
            seen, since = len(events), time.monotonic()
            limit = slow if "[slow]" in events[-1][2] else usual
        elif time.monotonic() - since > limit:
            kill_group(process)
            return f"no end after {limit} s"
    kill_group(process)
    return ending(process.returncode)


def run_cases(program, names, tally):
    """Runs test cases in one process. Returns those that another process must run."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "names").write_text("".join(re.sub(r"([\\\\,\\[\"])", r"\\\\\1", name) + "\n" for name in names))
        with open(scratch / "output", "w+b") as output:
            process = subprocess.Popen(
                [program, "--input-file", scratch / "names", "--order", "decl"], cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"DTENSOR_TEST_EVENTS": str(scratch / "events"), "TMPDIR": str(scratch)})
            how = wait_for_cases(process, scratch / "events")
            output.seek(0)
            text = output.read().decode(errors="replace")
        events = read_events(scratch / "events")

    ended = {name: (what, more) for what, name, more in events if what != "start"}
    running = [name for what, name, _ in events if what == "start" and name not in ended]
    if any(what == "fail" for what, _ in ended.values()) or process.returncode != 0:
        tally.output(text)
    for name in names:
        if name in running:
            tally.add("fail", name, how)
        elif name in ended:
            tally.add(ended[name][0], name, ended[name][1])
    left = [name for name in names if name not in ended and name not in running]
    if left and not events:
        for name in left:
            tally.add("fail", name, f"did not start: {how}")
        return []
    if not left and not running and process.returncode != 0 and all(what != "fail" for what, _ in ended.values()):
        tally.total += 1
        tally.add("fail", f"the end of the process that ran {names[-1]}", how)
    return left


def all_cases(program, names, tally):
    first, since = names[0], time.monotonic()
    while names:
        names = run_cases(program, names, tally)
    tally.took(f"cases from '{first}'", since)


def run_script(script, name, build, tally):
    """Runs a script: exit status 0 passes, 77 skips (the last line it printed says why), others fail."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        env = {"DTENSOR_BUILD": str(build), "DTENSOR_PREFIX": str(build / "stage/usr/local"), "TMPDIR": scratch}
        process = subprocess.Popen([script], cwd=ROOT, env=os.environ | env, stdin=subprocess.DEVNULL, text=True, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            text, status = process.communicate(timeout=SCRIPT_SECONDS)[0], None
        except subprocess.TimeoutExpired:
            kill_group(process)
            text, status = process.communicate()[0], f"no end after {SCRIPT_SECONDS} s"
        kill_group(process)
    tally.took(name, since)
    if status is None and process.returncode == 0:
        tally.add("pass", name)
    elif status is None and process.returncode == SKIPPED:
        tally.add("skip", name, text.strip().split("\n")[-1])
    else:
        tally.output(text)
        tally.add("fail", name, status or ending(process.returncode))


def first_include(header):
    """The header of ours that a header includes before anything else, if any."""
    found = re.search(r"^\s*#\s*include\s+[<\"]([^>\"]+)", (ROOT / "include" / header).read_text(), re.M)
    return found[1] if found and found[1].startswith("dtensor/") else None


def proofs(headers):
    """{header: header to compile}. Where X is the first thing that Y includes, Y compiles only if X compiles alone: so Y is enough."""
    includers = {first_include(str(path.relative_to(ROOT / "include"))): str(path.relative_to(ROOT / "include"))
                 for path in sorted((ROOT / "include").rglob("*.hpp"))}

    def proof(header):
        return proof(includers[header]) if header in includers else header

    return {header: proof(header) for header in headers}


def check_headers(headers, build, tally):
    """Compiles each header alone, by the build's own target for that."""
    objects = subprocess.run(["ninja", "-C", build, "-t", "targets", "all"], capture_output=True, text=True, check=True).stdout
    objects = re.findall(r"^(\S*libheaders\.a\.p/\S+\.o): ", objects, re.M)

    def object_of(header):
        stem = re.sub(r"[^a-zA-Z0-9]", "_", header)
        return next(o for o in objects if o.endswith(f"{stem}.cpp.o"))

    wanted = {header: object_of(proof) for header, proof in proofs(headers).items()}
    since = time.monotonic()
    ninja = subprocess.run(["ninja", "-C", build, "-k", "0", *sorted(set(wanted.values()))], capture_output=True, text=True)
    tally.took("headers", since)
    broken = set(re.findall(r"^FAILED: (?:\[code=\d+\] )?(\S+)", ninja.stdout, re.M))
    if ninja.returncode != 0:
        tally.output(ninja.stdout + ninja.stderr)
    for header, path in wanted.items():
        failed = path in broken or (ninja.returncode != 0 and not broken)
        tally.add("fail" if failed else "pass", f"header {header}")


def stage(build):
    """Installs the library into a folder of its own, as a package would be, for the consumers' tests."""
    shutil.rmtree(build / "stage", ignore_errors=True)
    subprocess.run(["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", build / "stage"], check=True,
                   stdout=subprocess.DEVNULL)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--sanitized"]
    sanitized = len(arguments) < len(sys.argv) - 1
    build, pattern = pathlib.Path(arguments[0]).resolve(), arguments[1] if len(arguments) > 1 else ""
    wanted = re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.I)
    program = build / "tests/dtensor-tests"

    listed = subprocess.run([program, "--names"], capture_output=True, text=True, check=True).stdout.splitlines()
    unusable = [line for line in listed if re.search(r'[],["\\]', line.split("\t")[0])]
    if unusable:
        sys.exit(f"test case names with a comma, bracket, quote or backslash mean something else to Catch2: {unusable}")
    cases = [line.split("\t")[0] for line in listed if wanted.search(line)]
    include = ROOT / "include"
    headers = [str(path.relative_to(include)) for path in sorted(include.rglob("*.hpp"))]
    headers = [header for header in headers if wanted.search(f"header {header}") and not sanitized]
    scripts = [(path, f"consumer {path.stem}") for path in sorted((ROOT / "tests/consumers").glob("*.sh"))]
    scripts += [(path, f"script {path.stem}") for path in sorted((ROOT / "tests").glob("*/*.sh")) if path.parent.name != "consumers"]
    scripts = [(path, name) for path, name in scripts if wanted.search(name) and not sanitized]

    tally = Tally(len(cases) + len(headers) + len(scripts))
    print(f"-- {len(cases)} test cases, {len(headers)} headers, {len(scripts)} scripts", flush=True)
    if headers:
        check_headers(headers, build, tally)
    if any(name.startswith("consumer") for _, name in scripts):
        stage(build)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        work = [pool.submit(run_script, path, name, build, tally) for path, name in scripts]
        work += [pool.submit(all_cases, program, cases[i:i + CASES_PER_PROCESS], tally)
                 for i in range(0, len(cases), CASES_PER_PROCESS)]
        for item in work:
            item.result()
    return tally.finish()


if __name__ == "__main__":
    sys.exit(main())
