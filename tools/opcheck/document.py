#!/usr/bin/env python3
"""Brings the tables of docs/operators.md up to date with what `opcheck --all --json FILE` found, a file for each libtorch version.

  build/tools/opcheck --all --cases 100 --json operators-1.13.json
  tools/opcheck/document.py operators-1.13.json operators-2.14.json

A file gives its version's row under "Measured"; the newest version gives the tables of rules and of missed placements. The rest of the
page is written by hand and stays.
"""
import argparse
import collections
import json
import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs/operators.md"


def load(path):
    with open(path) as file:
        return json.load(file)


def row(found):
    """Its line of the table "Measured"."""
    rules = [r for r in found["operators"] if "failed" not in r]
    columns = [found["libtorch"], len(rules), sum(r["cases"] for r in rules),
               sum(len(r["wrong"]) for r in rules) + len(found["operators"]) - len(rules), sum(len(r["missed"]) for r in rules),
               sum(r["samples"] == 0 for r in rules), sum(len(r["left_out"]) for r in rules)]
    return "| " + " | ".join(str(column) for column in columns) + " |"


def base(name):
    name = name.removeprefix("aten::").split(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def families(run):
    tables = collections.defaultdict(lambda: collections.defaultdict(collections.Counter))
    for r in run["operators"]:
        if "failed" not in r:
            tables[r["family"]][r["why"]][base(r["name"])] += 1
    for family in sorted(tables):
        count = sum(sum(names.values()) for names in tables[family].values())
        yield f"\n### {family} ({count})\n"
        yield "| operators | why their rule holds |"
        yield "|---|---|"
        for why, names in sorted(tables[family].items(), key=lambda item: sorted(item[1])):
            yield f"| {' '.join(f'`{n}`' for n in sorted(names))} | {why} |"


def missed(run):
    reasons = collections.defaultdict(list)
    for r in run["operators"]:
        for m in r.get("missed", []):
            reasons[m["reason"] or "(no reason known)"].append((base(r["name"]), m))
    yield "| reason | operators | placements | for example |"
    yield "|---|---|---|---|"
    for why, found in sorted(reasons.items(), key=lambda item: -len(item[1])):
        names = sorted({name for name, _ in found})
        shown = " ".join(f"`{n}`" for n in names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
        name, m = found[0]
        yield f"| {why} | {shown} | {len(found)} | `{name}`: {m['placements']} -> {m['legal']} |"


def version_of(run):
    return [int(number) for number in re.findall(r"\d+", run["libtorch"])]


def replace(page, pattern, text):
    assert len(re.findall(pattern, page, re.M | re.S)) == 1, f"docs/operators.md has no single place that matches {pattern}"
    return re.sub(pattern, lambda _: text, page, flags=re.M | re.S)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="written by opcheck --all --json")
    runs = sorted((load(path) for path in parser.parse_args().files), key=version_of)
    page = PAGE.read_text()
    for run in runs:
        page = replace(page, rf"^\| {re.escape(run['libtorch'])} \|[^\n]*$", row(run))
    shown = re.search(r"^## Rules \(libtorch ([\d.]+)\)", page, re.M)[1]
    newest = runs[-1]
    if version_of(newest) >= version_of({"libtorch": shown}):
        rules = [f"## Rules (libtorch {newest['libtorch']})", "",
                 "Each heading is a table in `ops/`, with its number of overloads. In-place and out= forms share the line of their operator.",
                 *families(newest), "", "## Missed placements", ""]
        page = replace(page, r"^## Rules \(.*?^## Missed placements\n\n", "\n".join(rules) + "\n")
        page = replace(page, r"^\| reason \| operators \|.*\Z", "\n".join(missed(newest)) + "\n")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
