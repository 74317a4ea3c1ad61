#!/usr/bin/env python3
"""Writes docs/operators.md from what `opcheck --all --json FILE` found, one file per libtorch version; the last gives the tables.

  build/tools/opcheck --all --json operators-1.13.json
  tools/opcheck/document.py operators-1.13.json operators-2.14.json > docs/operators.md
"""
import argparse
import collections
import json
import sys

HEAD = """# Operators

Every operator of libtorch works on DTensors. One with a **sharding rule** runs on the parts; one without runs on replicated operands
(right, with a warning, once per operator). What `opcheck` proves: for every operator with a rule it makes sample arguments (several
shapes and the dtypes float64, float32, bfloat16, int64, bool), lays them out in every
combination of placements on 2, 3 and 4 ranks (other dtypes than the first that it takes: on 3) and in drawn ones on a 2x2 mesh, with
unequal parts of Partial tensors, runs the operator, and compares results, written arguments and gradients with one device. Of an
operator with so many operands that there are more than 250 combinations (`--cases`), 250 are drawn for each sample (50 of an out= form,
which is the functional form and a copy).

From the samples of the table it makes more (`--widen`, 12 for each operator), of five classes in turn: an operand that broadcasts (fewer dims,
dims of length one, no dims), lengths of 0, 1, 2 and 7 (so that ranks hold nothing), infinities and NaN, memory orders (transposed, channels
innermost, expanded), and dtypes (half, bfloat16, bytes, 32-bit integers, masks of bytes, operands of two dtypes). These lie in drawn
placements on 4 ranks and on 2x2. Integers that mean something (pivots, offsets, lengths, indices) have legal values.

Each operator is examined in a process of its own. Where libtorch's own operator crashes on plain tensors, the sample is left out and
named; a crash or a hang on DTensors counts as wrong. `--registry` does all this for every operator in the registry, with a rule or not, and
says of each that takes no sample why; one without a reason is an error.

It also runs the *raw* operator on the parts, to find placements that are legal although the rule moves data: these are *missed*. Counted
are the simplest: not what another missed placement implies, nor what an in-place or out= form shares with its functional form.

```
build/tools/opcheck --all              # all rules; the last line is the count
build/tools/opcheck mm                 # one operator: what happens under every combination of placements
build/tools/opcheck --list             # the operators with a rule, and why each rule holds
build/tools/opcheck --without-rule     # those that run on replicated operands
build/tools/opcheck --registry         # every operator in libtorch's registry, and why some take no sample
build/tools/fuzz --seed 1 --programs 20000   # random programs of 5-40 operators against one device
```

"""


def load(path):
    with open(path) as file:
        return json.load(file)


def totals(found):
    rules = [r for r in found["operators"] if "failed" not in r]
    return (len(rules), sum(r["cases"] for r in rules), sum(len(r["wrong"]) for r in rules) + len(found["operators"]) - len(rules),
            sum(len(r["missed"]) for r in rules), sum(r["samples"] == 0 for r in rules))


def measured(runs):
    yield "| libtorch | overloads with a rule | cases | wrong | missed | overloads that took no sample |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        yield "| {} | {} | {} | {} | {} | {} |".format(run["libtorch"], *totals(run))


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="written by opcheck --all --json")
    parser.add_argument("--options", default="", help="the options that opcheck was given besides")
    parser.add_argument("--also", action="append", default=[], metavar="LINE", help="what else was measured: a command and its last line")
    arguments = parser.parse_args()
    runs = [load(path) for path in arguments.files]
    command = f"build/tools/opcheck --all {arguments.options}".rstrip()
    out = [HEAD.rstrip("\n"), "", "## Measured", "", f"`{command}`:", "", *measured(runs), "", *(f"- {line}" for line in arguments.also), "", f"## Rules (libtorch {runs[-1]['libtorch']})", "",
           "A heading is a table in `ops/`, with the number of overloads: in-place and out= forms share the line of their operator.",
           *families(runs[-1]), "", "## Missed placements", "",
           "Legal, but the rule moves data; each with the reason.", "", *missed(runs[-1])]
    sys.stdout.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
