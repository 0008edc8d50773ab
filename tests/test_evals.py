"""The evals of memory and the report, on small sizes: what they count, and what they collect."""

from __future__ import annotations

import json
import math
import random
import sys
from argparse import Namespace
from typing import Any

import pytest
from conftest import tiny
from transformers import PreTrainedModel

from evals import memory, prefix_reuse, report
from evals.common import machine_facts, write_results

TOKEN = 2 * 4 * 2 * 16 * 4  # bytes of K and V in a tiny model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A tiny model with the vocabulary of the real one's tokenizer."""
    model = tiny("llama", vocab_size=49152)
    model.generation_config.eos_token_id = 2
    return model


def test_requests_that_end_one_after_the_other_hold_what_is_counted(model, real):
    rows, steps = memory.three_requests(model, real[1], [(20, 6), (40, 3)], max_length=64)
    reserved, _, padded, blocks = steps.values()
    live = [20 + made + (40 + made) * (made < 3) for made in range(6)]
    assert [held.slots for held in reserved] == [2 * 64] * 6
    assert [held.slots for held in padded] == [2 * (40 + made) for made in range(6)]
    for contiguous in (reserved, padded):
        assert [held.tokens for held in contiguous] == live
    assert [held.bytes // TOKEN for held in padded] == [held.slots for held in padded]
    assert [held.tokens for held in blocks] == live
    # 20 to 25 tokens are in 2 blocks, 40 to 42 in 3.
    assert [held.slots for held in blocks] == [16 * (2 + 3 * (made < 3)) for made in range(6)]
    assert [held.bytes // TOKEN for held in blocks] == [held.slots for held in blocks]
    assert rows[-1]["waste, mean"] == pytest.approx(
        1 - sum(t / h.slots for t, h in zip(live, blocks, strict=True)) / 6
    )


def test_three_requests_of_25_47_and_12_tokens_take_six_blocks(model, real):
    rows, steps = memory.three_requests(model, real[1], memory.SIX_BLOCKS, memory.MAX_LENGTH)
    reserved, _, padded, [blocks] = steps.values()
    assert reserved[0].slots == 3 * 2048
    assert padded[0].slots == 3 * 47
    assert (blocks.blocks, blocks.slots, blocks.tokens) == (6, 96, 84)
    assert [row["blocks, most"] for row in rows] == [None, None, None, 6]
    assert rows[-1]["bytes by step"] == [96 * TOKEN]


def test_each_cache_is_watched_and_one_without_its_backend_is_named(model, real, monkeypatch):
    def without_backend(config: Any, longest: int) -> dict[str, Any]:
        def fail() -> None:
            raise ImportError("no such backend")

        ways = found(config, longest)
        del ways["QuantizedCache, 4 bits (quanto)"]  # compiles for minutes where it is installed
        return {**ways, "QuantizedCache of tomorrow": fail}

    found = memory.caches
    monkeypatch.setattr(memory, "caches", without_backend)
    case = memory.Case("two", [20, 9], 3, kwargs={"do_sample": False})
    rows, steps = memory.compared(model, real[1], case)
    assert rows[-1]["case"] == "QuantizedCache of tomorrow: not installed"
    assert [len(held) for held in steps.values()] == [3] * (len(rows) - 1)
    dynamic, static, in_8_bits = (
        steps[name] for name in ("DynamicCache", "StaticCache", "QuantizedCache, 8 bits (fp8)")
    )
    assert [held.bytes // TOKEN for held in dynamic] == [40, 42, 44]
    assert [held.tokens for held in dynamic] == [29, 31, 33]
    assert [held.slots for held in static] == [2 * 23] * 3
    assert in_8_bits[-1].bytes == pytest.approx(dynamic[-1].bytes / 4, rel=0.01)
    assert [held.slots for held in steps["PagedCache"]] == [16 * 3] * 3
    assert rows[-2]["blocks by step"] == [3] * 3
    assert rows[0]["bytes by step"] == [40 * TOKEN, 42 * TOKEN, 44 * TOKEN]


def test_random_batches_waste_what_their_lengths_say():
    row = memory.ragged_batches(16, batches=1, rows=3, new=2)
    numbers = random.Random(memory.SEED)
    lengths = [int(256 * 8 ** numbers.random()) for _ in range(3)]
    shares = []
    for step in range(2):
        slots = [(length + step + 15) // 16 * 16 for length in lengths]
        shares.append(1 - (sum(lengths) + 3 * step) / sum(slots))
    assert row["waste, mean"] == pytest.approx(sum(shares) / 2)
    assert row["waste, worst batch"] == pytest.approx(max(shares))


def test_waste_above_the_goal_is_said():
    good, bad = ({"case": "PagedCache", "waste, most": waste} for waste in (0.03, 0.05))
    assert list(memory.missed({"4 prompts of 256 tokens": [good], "4 beams": [bad]})) == []
    [sentence] = memory.missed({"4 prompts of 256 tokens": [good, bad]})
    assert "5.0%" in sentence


def test_goals_of_reuse_that_are_missed_are_said():
    dynamic, copies = ({"case": "a", "questions/s": x, "K/V MiB": 1500.0} for x in (0.5, 2.0))
    index = {"case": "index", "questions/s": 2.5, "K/V MiB": 90.0, "index %": 0.4, "x": 9.0}
    known = {"case": "tree", "match ms": 0.7}

    def missed(**worse: float) -> list[str]:
        one = {name: worse.get(name, value) for name, value in index.items()}
        tree = {name: worse.get(name, value) for name, value in known.items()}
        return list(prefix_reuse.missed([dynamic, copies, one], [dynamic, one], [one], [tree]))

    assert missed() == []
    for goal, value, said in [
        ("x", 4.9, "4.9 times"),
        ("questions/s", 1.9, "not faster"),
        ("K/V MiB", 500.0, "33%"),
        ("index %", 1.2, "1.20%"),
        ("match ms", 2.1, "2.1 ms"),
    ]:
        sentences = missed(**{goal: value})
        assert sentences
        assert all(said in sentence for sentence in sentences)
        assert missed(**{goal: math.nan})
    same, other = ({"case": name, "equal": name == "same"} for name in ("same", "other"))
    [sentence] = prefix_reuse.differing([same], [same, other])
    assert sentence.startswith("other:")


def test_the_report_collects_new_results_and_old_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/a/folder/evals/some.py", "--out", "/a/folder", "--quick"])
    rows = [{"case": "a", "by step": [1, 2], "x": 1.25}, {"case": "b", "by step": "", "x": None}]
    write_results(tmp_path, "some", "Some", machine_facts(), {"How fast": rows})
    (tmp_path / "some.png").touch()
    old = {"machine": {"command": "python evals/older.py"}, "What was": [{"case": "b", "x": 3}]}
    (tmp_path / "older_one.json").write_text(json.dumps(old))
    assert report.main(Namespace(out=tmp_path)) == 0
    text = (tmp_path / "report.md").read_text()
    assert "| [Some](#some) | `python -m evals.some --quick` |" in text
    assert "| [Older one](#older-one) | `python evals/older.py` |" in text
    assert "### How fast\n\n| case | x |\n|---|---|\n| a | 1.25 |\n| b |  |\n" in text
    assert json.loads((tmp_path / "some.json").read_text())["How fast"] == rows
    assert "### What was" in text
    assert text.count("![") == 1
    assert "![Some](some.png)" in text
    assert "/a/folder" not in text

    (tmp_path / "other.json").write_text("[1]")
    assert report.main(Namespace(out=tmp_path)) == 1
    assert "other.json holds no results of an eval" in capsys.readouterr().out
