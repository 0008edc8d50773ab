"""What a cache holds and which way its attention went, as numbers and as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .backends import backend_for
from .core.allocator import BlockGroup
from .core.forward import CacheState
from .core.metadata import shown_columns
from .view import Reader

# A map shows no more rows, and no more blocks of a row.
MAP_ROWS, MAP_BLOCKS = 32, 96
FILLED = "▁▂▃▄▅▆▇█"  # a block by the share of its slots that hold a token
OWN, SHARED, GIVEN_BACK = "steel_blue1", "orange1", "grey50"


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
        compiled_calls: how many of all came from compiled forwards.
        eager_reason: why decode steps cannot be compiled, None if generate may compile them.
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
    compiled_calls: int = 0
    eager_reason: str | None = None

    def __str__(self) -> str:
        table = Table(title="PagedCache", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        waste = f" ({self.wasted_slots / self.slots:.1%})" if self.slots else ""
        share = f" ({self.bytes / self.dense_bytes:.0%} of it)" if self.dense_bytes else ""
        table.add_row("rows, tokens", f"{self.rows}, {self.tokens}")
        table.add_row("blocks", f"{self.blocks}, each of {self.block_size} token slots")
        table.add_row("wasted slots", f"{self.wasted_slots}{waste}")
        table.add_row("shared blocks", str(self.shared_blocks))
        table.add_row("memory", format_bytes(self.bytes))
        table.add_row("DynamicCache", f"{format_bytes(self.dense_bytes)}{share}")
        table.add_row("attention", f"{self.backend}, {self.paged_calls} calls")
        if self.compiled_calls:
            table.add_row("compiled", f"{self.compiled_calls} calls")
        for reason, calls in sorted(self.dense_calls.items()):
            table.add_row("  gathered", f"{calls} calls: {reason}")
        out = io.StringIO()
        Console(file=out, width=80).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def report(state: CacheState, reader: Reader) -> CacheReport:
    """What a cache holds, what a DynamicCache would, and which way attention went."""
    tokens, tables = state.tokens, state.tables
    blocks = shared = slots = stored = num_bytes = dense_bytes = 0
    for index, group in enumerate(state.allocator.groups):
        held = np.unique(tables.held(index))
        blocks += len(held)
        shared += int((group.ref_counts[held] > 1).sum())
        slots += len(held) * group.block_size
        stored += tables.filled_slots(index)
        kept, _ = shown_columns(group.window, tokens.columns, 0)
        for storage in group.storage.values():
            stored_blocks = max(len(storage.keys), 1)
            num_bytes += len(held) * storage.num_bytes // stored_blocks
            per_block = storage.num_bytes_unpadded // stored_blocks
            dense_bytes += len(tokens) * kept * per_block // group.block_size
    layers = [storage for group in state.allocator.groups for storage in group.storage.values()]
    backend = backend_for(reader.backend, layers[0].keys.device) if layers else "dense"
    return CacheReport(
        rows=len(tokens),
        tokens=int(tokens.lengths.sum()),
        blocks=blocks,
        block_size=state.allocator.block_size,
        slots=slots,
        wasted_slots=slots - stored,
        shared_blocks=shared,
        bytes=num_bytes,
        dense_bytes=dense_bytes,
        backend="dense" if isinstance(backend, str) else backend.name,
        paged_calls=reader.calls.paged,
        dense_calls=dict(reader.calls.dense),
        compiled_calls=reader.calls.compiled,
        eager_reason=reader.eager_reason,
    )


def block_map(
    groups: Sequence[BlockGroup], tables: Sequence[np.ndarray], lengths: np.ndarray
) -> str:
    """HTML of a line for each row of each layer group, with a character for each of its blocks.

    Args:
        groups: the layer groups.
        tables: for each group int32 [rows, width], the blocks; -1 where a row holds none.
        lengths: int64 [rows], tokens of each row.
    """
    console = Console(file=io.StringIO(), record=True, width=MAP_BLOCKS + 40, highlight=False)
    console.print(
        f"PagedCache: [{OWN}]█[/] a block of one row, [{SHARED}]█[/] of several, "
        f"[{GIVEN_BACK}]·[/] given back behind a window"
    )
    for group, table in zip(groups, tables, strict=True):
        console.print(f"{group}, {group.block_size} slots a block")
        for row, length in enumerate(lengths[:MAP_ROWS]):
            console.print(Text(f"{row:>4} ") + _blocks_of_row(group, table[row], int(length)))
        if len(lengths) > MAP_ROWS:
            console.print(f"     and {len(lengths) - MAP_ROWS} rows more")
    return console.export_html(code_format="<pre>{code}</pre>", inline_styles=True)


def _blocks_of_row(group: BlockGroup, blocks: np.ndarray, length: int) -> Text:
    text = Text()
    starts = range(0, length, group.block_size)
    for start, block in zip(starts[:MAP_BLOCKS], blocks, strict=False):
        filled = min(length - start, group.block_size)
        if block < 0:
            text.append("·", GIVEN_BACK)
            continue
        eighths = -(-8 * filled // group.block_size)
        text.append(FILLED[eighths - 1], SHARED if group.ref_counts[block] > 1 else OWN)
    more = len(starts) - MAP_BLOCKS
    return text + Text(f" and {more} more" if more > 0 else "") + Text(f" {length} tokens")


def format_bytes(count: float) -> str:
    """`count` bytes as text, in units of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
