"""What README and docs say: links lead somewhere, code runs, and the worked example is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

from hf_paged import PagedCache

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_stays_short() -> None:
    """It had grown to 2,800 words, which nobody reads."""
    assert len(text_of("README.md").split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """A page was moved, and what linked to it was not."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.M)
            assert heading in [title.lower().replace(" ", "-") for title in titles], target


def test_the_readmes_code_runs(real: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What a newcomer copies must run; only the model comes from elsewhere, and memory is less."""
    model, tokenizer = real
    before = model.config._attn_implementation
    model.set_attn_implementation("hf_paged")
    blocks = re.findall(r"^```python\n(.*?)^```$", text_of("README.md"), re.M | re.S)
    code = "\n".join(blocks).replace("4GiB", "64MiB")
    lines = [line for line in code.splitlines() if ".from_pretrained(" not in line]
    assert len(lines) == len(code.splitlines()) - 2
    names = {"model": model, "tokenizer": tokenizer}
    try:
        exec("\n".join(lines), names)
    finally:
        model.set_attn_implementation(before)
    assert names["pool"].stats()["misses"] == 2
    assert names["pool"].num_evictable
    assert "each of 16 token slots" in capsys.readouterr().out


def test_the_walk_of_one_decode_step() -> None:
    """The numbers of the worked example in docs/design.md are those of a real step."""
    walk = " ".join(text_of("docs/design.md").split())
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    assert "`[0, 1]` and `[2]`" in walk
    assert "from `[6, 4]` to `[7, 5]`" in walk
    assert "now `[0, 1]` and `[2, 3]`" in walk
    with torch.no_grad():
        model(torch.full((2, 6), 5), attention_mask=mask, past_key_values=cache)
        assert cache.block_tables == [[0, 1], [2]]
        assert cache.row_lengths == [6, 4]
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        model(torch.full((2, 1), 5), attention_mask=mask, past_key_values=cache)
    assert cache.block_tables == [[0, 1], [2, 3]]
    assert cache.row_lengths == [7, 5]
    assert cache.get_seq_length() == 7
