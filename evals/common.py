"""What the evals share: medians of alternating runs, facts about the machine, written results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import hf_paged

Rows = list[dict[str, Any]]


def alternate(rounds: int, *calls: Callable[[], Any]) -> list[float]:
    """Median seconds of each call, run in turn, after one run of each to warm up."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, spent in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in times]


def machine_facts() -> dict[str, Any]:
    """What a reader needs to repeat a measurement."""
    return {
        "command": _command(),
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "hf_paged": hf_paged.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": torch.initial_seed(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_results(
    folder: Path, name: str, title: str, facts: dict[str, Any], results: dict[str, Rows]
) -> None:
    """Write `name`.json and .md to a folder and print the tables.

    A row's lists, as what there was at each step, are in the .json only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": facts, **results}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"# {title}\n\n{markdown(facts, results)}")
    console = Console(width=140)
    for heading, rows in results.items():
        console.print(_table(heading, rows))


def markdown(facts: dict[str, Any], results: dict[str, Rows], level: int = 2) -> str:
    """Facts as a list, and each table under a heading of that level."""
    known = "".join(f"- {key}: {value}\n" for key, value in facts.items())
    tables = (_markdown("#" * level, heading, rows) for heading, rows in results.items())
    return known + "\n" + "\n".join(tables)


def _command() -> str:
    """What repeats this run; where its results go is nobody else's business."""
    script, *arguments = sys.argv
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    return " ".join([f"python -m evals.{Path(script).stem}", *arguments])


def _processor() -> str:
    """The processor's model where Linux names it, elsewhere what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _columns(rows: Rows) -> list[str]:
    return [name for name, value in rows[0].items() if not isinstance(value, list)]


def _cells(row: dict[str, Any], columns: list[str]) -> list[str]:
    return [_cell(row[name]) for name in columns]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(title: str, rows: Rows) -> Table:
    table, columns = Table(title=title, title_justify="left"), _columns(rows)
    for name in columns:
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        table.add_row(*_cells(row, columns))
    return table


def _markdown(marks: str, title: str, rows: Rows) -> str:
    columns = _columns(rows)
    lines = [f"{marks} {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cells(row, columns)) + " |" for row in rows]
    return "\n".join(lines) + "\n"
