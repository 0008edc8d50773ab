"""All results in one file: tables, plots, machines, versions, and the commands to repeat them.

    python -m evals.report

Collects every .json file in evals/results/ (or --out) into report.md there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from evals.common import markdown

INTRODUCTION = """# Results

What `python -m evals.report` found in this folder. Each section names the machine, the versions and
the command; `pip install -c constraints.txt ".[evals]"` installs what the commands need.
"""


def section(path: Path) -> tuple[str, str]:
    """(line of the overview, section) of the results that an eval wrote to `path`.

    Raises:
        ValueError: an eval did not write that file.
    """
    found: Any = json.loads(path.read_text())
    if not isinstance(found, dict) or not isinstance(found.get("machine"), dict):
        raise ValueError(f"{path.name} holds no results of an eval; move it out of the folder.")
    facts = found.pop("machine")
    name = path.stem
    title = name.replace("_", " ").capitalize()
    cells = (f"[{title}](#{title.lower().replace(' ', '-')})", f"`{facts['command']}`")
    known = (str(facts.get(key, "")) for key in ("date", "torch", "transformers", "seed"))
    text = f"## {title}\n\n{markdown(facts, found, level=3)}"
    if path.with_suffix(".png").exists():
        text += f"\n![{title}]({name}.png)\n"
    return f"| {' | '.join([*cells, *known])} |\n", text


def main(arguments: argparse.Namespace) -> int:
    console = Console()
    paths = sorted(arguments.out.glob("*.json"))
    if not paths:
        console.print(f"[red]There are no results in {arguments.out}; run an eval first.[/red]")
        return 1
    try:
        overview, sections = zip(*map(section, paths), strict=True)
    except ValueError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    table = f"| eval | command | date | torch | transformers | seed |\n{'|---' * 6}|\n"
    report = arguments.out / "report.md"
    report.write_text("\n".join([INTRODUCTION, table + "".join(overview), *sections]))
    console.print(f"{len(paths)} results are in {report}.")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    sys.exit(main(parser.parse_args()))
