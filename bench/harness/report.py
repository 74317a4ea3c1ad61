"""Rows as a table on the terminal, as the tables of docs/performance.md and as a picture."""
from __future__ import annotations

import itertools
import math
import pathlib

from .row import Row, number, summary

BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


def cells(row: Row) -> list[str]:
    verdict = {None: "", True: "reached", False: "MISSED"}[row.reached()]
    peer = summary(row.peer) if row.peer else ""
    ratio = summary(row.ratios()) if row.peer and row.group != "instructions" else ""
    return [row.name, summary(row.here), row.unit, peer, ratio, row.target(), verdict]


def table(rows: list[Row]) -> str:
    """For the terminal."""
    header = ["", "here", "", "peer", "ratio", "must reach", ""]
    lines = []
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        members = list(members)
        peers = sorted({row.peer_name for row in members if row.peer})
        block = [header] + [cells(row) for row in members]
        widths = [max(len(line[i]) for line in block) for i in range(len(header))]
        lines.append(f"{group}" + (f" (peer: {', '.join(peers)})" if peers else ""))
        lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in block] + [""]
    return "\n".join(lines)


def markdown(rows: list[Row]) -> str:
    lines = []
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        members = list(members)
        compared, asked = any(row.peer for row in members), any(row.target() for row in members)
        peers = ", ".join(sorted({row.peer_name for row in members if row.peer}))
        rounds = max(len(row.here) for row in members)
        header = [group + (f" ({rounds} rounds)" if rounds > 1 else ""), f"here, {members[0].unit}"]
        header += ([peers, "ratio"] if compared else []) + (["must reach", ""] if asked else [])
        lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for row in members:
            name, here, unit, peer, ratio, target, verdict = cells(row)
            here = here if unit == members[0].unit else f"{here} {unit}"
            line = [name, here] + ([peer, ratio] if compared else []) + ([target, verdict.replace("MISSED", "**missed**")] if asked else [])
            lines.append("| " + " | ".join(line) + " |")
        lines.append("")
    return "\n".join(lines)


def picture(rows: list[Row]) -> str:
    """An SVG of the ratios to the peers, on a logarithmic axis; a mark shows what must be reached."""
    rows = [row for row in rows if row.peer and row.ratio_at_least is not None]
    left, width, line = 330, 420, 18
    most = max([row.ratio() for row in rows] + [10])
    scale = lambda ratio: left + width * math.log10(max(ratio, 0.5) / 0.5) / math.log10(most / 0.5)  # noqa: E731
    height = line * len(rows) + 60
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 80}" height="{height}" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="white"/>',
             '<text x="10" y="18" font-weight="bold">Times faster than the peer, in one run (bars: median; ticks: what must be reached)</text>']
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if t <= most]
    for tick in ticks:
        x = scale(tick)
        parts.append(f'<line x1="{x:.0f}" y1="28" x2="{x:.0f}" y2="{height - 24}" stroke="{"#888" if tick == 1 else "#ddd"}"/>'
                     f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">{tick:g}</text>')
    for i, row in enumerate(rows):
        y, ratio, goal = 32 + i * line, row.ratio(), scale(row.ratio_at_least)
        color = "#2b7bba" if row.reached() else "#c0392b"
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{row.group.split(",")[-1].strip()}: {row.name}</text>'
                     f'<rect x="{left}" y="{y + 2}" width="{max(scale(ratio) - left, 1):.0f}" height="{line - 5}" fill="{color}"/>'
                     f'<text x="{scale(ratio) + 5:.0f}" y="{y + 12}">{number(ratio)}</text>'
                     f'<line x1="{goal:.0f}" y1="{y}" x2="{goal:.0f}" y2="{y + line - 1}" stroke="black" stroke-width="2"/>')
    return "\n".join(parts + ["</svg>"]) + "\n"


def merged(runs: list[dict]) -> list[dict]:
    """One run for each pair of versions; of what was measured twice, the last."""
    by_versions: dict = {}
    for run in runs:
        whole = by_versions.setdefault((run["libtorch"], run["torch"]), {**run, "machine": [], "date": [], "rows": {}})
        whole["rows"].update({(row["group"], row["name"]): Row(**row) for row in run["rows"]})
        for key in ("machine", "date"):
            whole[key] += [run[key]] if run[key] not in whole[key] else []
    for run in by_versions.values():
        groups = [group for group, _ in run["rows"]]
        run["rows"] = sorted(run["rows"].values(), key=lambda row: groups.index(row.group))
    return list(by_versions.values())


def write_page(page: pathlib.Path, runs: list[dict]) -> str:
    """Replaces what lies between the marks of the page, and draws the first run with a peer beside it; says what the page now holds."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    blocks, said = [], []
    runs = merged(runs)
    for run in runs:
        peer = f", beside PyTorch {run['torch']}" if run["torch"] else ""
        blocks.append(f"### libtorch {run['libtorch']}{peer}\n\n{'; '.join(run['machine'] + run['date'])}; medians, and their range.\n\n"
                      f"{markdown(run['rows'])}")
        said.append(f"libtorch {run['libtorch']}{peer}: {', '.join(dict.fromkeys(row.group for row in run['rows']))}")
    drawing = picture(next((run["rows"] for run in runs if run["torch"]), []))
    page.write_text(before + BEGIN + "\n" + "\n".join(blocks) + "\n" + END + after)
    page.with_suffix(".svg").write_text(drawing)
    return f"{page} now holds\n  " + "\n  ".join(said)
