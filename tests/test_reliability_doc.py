"""docs/reliability.md names tests that exist, and says how much they try."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from test_hostile import DAMAGED, FORGERIES, HEADERS, KINDS, LAYOUTS, MANY_DAMAGED, MASKS
from test_snapshot import BAD_IN_BOTH, BAD_IN_ONE

TESTS = Path(__file__).parent
DOC = TESTS.parent / "docs" / "reliability.md"


def names_in(path: Path) -> set[str]:
    """What pytest may collect from a file: its functions, classes and `Test... = ...`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def test_every_test_that_the_doc_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", DOC.read_text())
    assert len(named) > 50
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(TESTS / file)]
    assert not missing


def test_every_row_of_a_table_names_a_test() -> None:
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if row != "| promise | tests |"]
    assert len(promises) > 15
    assert not [row for row in promises if ".py::test" not in row.lower()]


def test_the_doc_says_how_much_is_tried() -> None:
    kinds = len(KINDS)
    forged = kinds * (len(HEADERS) + len(FORGERIES) + len(BAD_IN_BOTH)) + len(BAD_IN_ONE)
    said = (
        f"Tried in each run: {kinds * DAMAGED} damaged files (*slow*: {kinds * MANY_DAMAGED:,}), "
        f"{forged} forged ones, {MASKS} masks for each model and backend, {len(LAYOUTS)} layouts "
        "of token ids."
    )
    assert said in " ".join(DOC.read_text().split())
