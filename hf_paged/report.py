"""What a cache holds and which way its attention went, as numbers and as a table."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class CacheReport:
    """A cache at one moment. Counts are over all layer groups; `print` it for a table.

    Attributes:
        rows: sequences.
        tokens: tokens of all rows, padding not counted.
        blocks: blocks held; a block that several rows share counts once.
        block_size: slots in a block.
        slots: token slots in those blocks.
        wasted_slots: slots that hold no token.
        shared_blocks: blocks with more than one holder.
        bytes: of K and V in those blocks.
        dense_bytes: of K and V that a DynamicCache would hold for the same batch, padding included.
        backend: the attention backend in use.
        paged_calls: attention calls that read K/V through the block tables.
        dense_calls: reason -> attention calls that gathered K/V first.
    """

    rows: int
    tokens: int
    blocks: int
    block_size: int
    slots: int
    wasted_slots: int
    shared_blocks: int
    bytes: int
    dense_bytes: int
    backend: str
    paged_calls: int
    dense_calls: dict[str, int]

    def __str__(self) -> str:
        table = Table(title="PagedCache", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        waste = f" ({self.wasted_slots / self.slots:.1%})" if self.slots else ""
        share = f" ({self.bytes / self.dense_bytes:.0%} of it)" if self.dense_bytes else ""
        table.add_row("rows, tokens", f"{self.rows}, {self.tokens}")
        table.add_row("blocks", f"{self.blocks} of {self.block_size} slots")
        table.add_row("wasted slots", f"{self.wasted_slots}{waste}")
        table.add_row("shared blocks", str(self.shared_blocks))
        table.add_row("memory", format_bytes(self.bytes))
        table.add_row("DynamicCache", f"{format_bytes(self.dense_bytes)}{share}")
        table.add_row("attention", f"{self.backend}, {self.paged_calls} calls")
        for reason, calls in sorted(self.dense_calls.items()):
            table.add_row("  gathered", f"{calls} calls: {reason}")
        out = io.StringIO()
        Console(file=out, width=80).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def format_bytes(count: float) -> str:
    """`count` bytes as text, in units of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
