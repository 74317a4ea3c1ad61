"""One measured thing, several times over, beside a peer or alone, and what it must reach."""
from __future__ import annotations

import dataclasses
import math
import statistics


@dataclasses.dataclass
class Row:
    group: str
    name: str
    unit: str
    here: list[float]  # by round
    peer: list[float] = dataclasses.field(default_factory=list)  # in the same rounds; empty: there is none
    peer_name: str = ""
    higher_is_better: bool = False
    ratio_at_least: float | None = None  # of the medians of rounds, in our favour
    here_at_most: float | None = None
    here_at_least: float | None = None

    def check(self) -> None:
        """Throws ValueError when these are not numbers of rounds."""
        numbers, paired = self.here + self.peer, len(self.peer) == len(self.here)
        if not self.here or (self.peer and (not paired or 0 in numbers)) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{self.group}, {self.name}: these are no rounds: {self.here} beside {self.peer}")

    def ratios(self) -> list[float]:
        pairs = zip(self.here, self.peer)
        return [a / b if self.higher_is_better else b / a for a, b in pairs]

    def ratio(self) -> float | None:
        return statistics.median(self.ratios()) if self.peer else None

    def target(self) -> str:
        wanted = []
        if self.ratio_at_least is not None and self.peer:
            wanted.append(f"ratio >= {self.ratio_at_least:g}")
        if self.here_at_most is not None:
            wanted.append(f"<= {self.here_at_most:g} {self.unit}".rstrip())
        if self.here_at_least is not None:
            wanted.append(f">= {self.here_at_least:g} {self.unit}".rstrip())
        return ", ".join(wanted)

    def reached(self) -> bool | None:
        """None: nothing was asked, or there was no peer to compare with."""
        here, verdicts = statistics.median(self.here), []
        if self.ratio_at_least is not None and self.peer:
            verdicts.append(self.ratio() >= self.ratio_at_least)
        if self.here_at_most is not None:
            verdicts.append(here <= self.here_at_most)
        if self.here_at_least is not None:
            verdicts.append(here >= self.here_at_least)
        return all(verdicts) if verdicts else None


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def summary(values: list[float]) -> str:
    """The median, and the range where there is one."""
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}-{number(max(values))})"
