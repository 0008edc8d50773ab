"""docs/architectures.md: written by the suite, and compared with what the suite finds.

pytest tests/architectures -m "slow or not slow" -n 2 --write-architectures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from .compare import Result

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
SECTIONS = ("Causal language models", "Encoder-decoder models", "Vision and audio models")
_rows: dict[tuple[str, str], str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-architectures", action="store_true", help=f"write {PAGE.name} anew")


@pytest.fixture
def note(record_property: Callable, request: pytest.FixtureRequest) -> Callable[[Result], None]:
    """Notes a row of the page; it must be the page's own, unless that is being written."""

    def note(result: Result) -> None:
        record_property("architecture", (result.section, result.name, str(result)))
        page = PAGE.read_text() if PAGE.exists() else ""
        is_written = request.config.getoption("--write-architectures", False)
        if not is_written and f"transformers {transformers.__version__}" in page:
            assert str(result) in page, "write docs/architectures.md anew (see conftest.py)"

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "architecture" and report.when == "call":
            section, architecture, row = value
            _rows[section, architecture] = (
                row if report.passed else f"| `{architecture}` | FAIL | | | |"
            )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-architectures", False) and not hasattr(
        session.config, "workerinput"
    ):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())


def page() -> str:
    """The whole page from the rows that were noted."""
    text = [
        "# Architectures",
        "",
        "Written by the suite in `tests/architectures`; the command is in its `conftest.py`.",
        f"Tiny random models in float32, on transformers {transformers.__version__}, each against",
        "`DynamicCache`: a left-padded batch, beams, prompt lookup and a second turn on the same",
        "cache. Pictures and sounds go through the models' own processors, in both turns.",
        '"Paged" means that the attention of every decode step reads K/V through the block',
        'tables; "dense" that they are gathered first, and why. Groups are layers that share a',
        "table.",
        "",
    ]
    for section in SECTIONS:
        rows = [row for (kind, _), row in sorted(_rows.items()) if kind == section]
        count = {word: sum(f"| {word} |" in row for row in rows) for word in ("pass", "paged")}
        refused = sum("| refused |" in row for row in rows)
        text += [
            f"## {section}",
            "",
            f"{len(rows)} architectures: {count['pass']} pass, {count['paged']} of them paged; "
            f"{refused} refused; {len(rows) - count['pass'] - refused} left out.",
            "",
            "| architecture | result | decode | groups | remarks |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    return "\n".join(text)
