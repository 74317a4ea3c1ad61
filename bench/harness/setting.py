"""What a suite is told, and how it makes rows of rounds."""
from __future__ import annotations

import dataclasses
import pathlib

from .row import Row


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
