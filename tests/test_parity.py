"""evals/parity.py on a tiny model: ways pass, faults are caught, and a bug makes it exit with 1."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_paged
from evals import parity
from evals.parity import Parity, Setting
from evals.ways import FAULTS, WAYS, Caches, PagedCaches, Scores, Text
from hf_paged.core.storage import LayerStorage

F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


@functools.cache
def model(dtype: torch.dtype) -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=2).to(dtype)


@functools.cache
def text() -> Text:
    torch.manual_seed(0)
    return Text.searched(model(F32), torch.randint(3, 99, (4, 64)), beams=3, new=6)


@functools.cache
def references(name: str, setting: Setting) -> tuple[Scores, Parity]:
    """What DynamicCache gives on a way, and how far eager attention is from it."""
    kinds = (
        Caches(model(setting.dtype), attention, setting.kv_dtype) for attention in ("sdpa", "eager")
    )
    reference, eager = (caches.score(WAYS[name], text()) for caches in kinds)
    return reference, Parity.of(eager, reference)


def compared(
    name: str, setting: Setting, kind: type[PagedCaches] = PagedCaches, backend: str = "cpu"
) -> tuple[Parity, list[str]]:
    """How PagedCache does on a way, and the gates that it fails."""
    reference, floor = references(name, setting)
    caches = kind(model(setting.dtype), backend, setting.kv_dtype)
    found = Parity.of(caches.score(WAYS[name], text()), reference)
    return found, found.failed(setting, floor)


def name_of(kind: type[PagedCaches]) -> str:
    return next(name for name, way in WAYS.items() if way is kind.way)


@pytest.mark.parametrize("name", WAYS)
def test_every_way_passes(name: str) -> None:
    found, failed = compared(name, Setting(F32))
    assert not failed
    assert found.greedy
    assert found.tokens >= 30


@pytest.mark.parametrize("setting", parity.SETTINGS, ids=str)
def test_every_setting_passes(setting: Setting) -> None:
    for name in ("chunked prefill", "evicted, reloaded", "ragged batch"):
        for backend in ("cpu", "dense"):
            found, failed = compared(name, setting, backend=backend)
            assert not failed, (name, backend, found)


@pytest.mark.parametrize("kind", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("setting", parity.SETTINGS, ids=str)
def test_every_fault_is_caught(kind: type[PagedCaches], setting: Setting) -> None:
    assert name_of(kind) in setting.ways
    assert compared(name_of(kind), setting, kind)[1]


def test_the_statistics_are_those_of_the_distributions() -> None:
    logits, targets = torch.randn(50, 7), torch.randint(7, (50,))
    rows = torch.arange(50) % 3
    reference = Scores(logits, targets, rows, torch.zeros(1, 2), 0.0)
    noisy = replace(reference, logits=logits + 0.1 * torch.randn(50, 7))
    found = Parity.of(noisy, reference)
    own, other = (torch.log_softmax(s.logits.double(), -1) for s in (noisy, reference))
    divergence = torch.nn.functional.kl_div(own, other, reduction="none", log_target=True).sum(-1)
    assert found.kl == pytest.approx(float(divergence.mean()))
    assert found.kl_row == pytest.approx(max(float(divergence[rows == r].mean()) for r in range(3)))
    assert found.kl_max == pytest.approx(float(divergence.max()))
    likelihood = own[range(50), targets]
    assert found.perplexity == pytest.approx(math.exp(-likelihood.mean()))
    difference = likelihood - other[range(50), targets]
    assert found.likelihood == pytest.approx(float(difference.mean()))
    assert found.error == pytest.approx(float(difference.std() / 50**0.5))
    assert found.max_logit == pytest.approx(float((noisy.logits - logits).abs().max()))
    assert found.rms_logit == pytest.approx(float((noisy.logits - logits).square().mean() ** 0.5))
    assert found.max_log_prob == pytest.approx(float((own - other).abs().max()))
    assert found.top1 == (own.argmax(-1) == other.argmax(-1)).double().mean()
    assert found.greedy


def test_what_the_floor_allows() -> None:
    _, floor = references("chunked prefill", Setting(F32))
    found = replace(floor, max_log_prob=2e-4)
    assert not found.failed(Setting(F32), replace(floor, max_log_prob=1e-4))
    assert found.failed(Setting(F32), replace(floor, max_log_prob=5e-5)) == ["max log-prob"]
    tight = replace(floor, max_log_prob=0)
    assert not replace(found, max_log_prob=9e-5).failed(Setting(F32), tight)
    one_row = replace(floor, kl_row=3 * floor.kl_row)  # hidden in the mean over all
    assert one_row.failed(Setting(BF16), floor) == ["KL of a row"]


def test_nan_fails_every_gate() -> None:
    reference, floor = references("chunked prefill", Setting(F32))
    broken = Parity.of(
        replace(reference, logits=torch.full_like(reference.logits, torch.nan)), reference
    )
    assert broken.failed(Setting(F32), floor)
    assert broken.failed(Setting(BF16), floor)


# The whole program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, a text, and a data set of it."""
    folder = tmp_path_factory.mktemp("parity")
    words = {f"w{number}": number for number in range(99)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0").save_pretrained(folder)
    model(F32).save_pretrained(folder)
    ids = torch.randint(3, 99, (700,), generator=torch.Generator().manual_seed(0))
    lines = " ".join(f"w{number}" for number in ids.tolist())
    (folder / "text").write_text(lines)
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text(json.dumps({"text": lines}) + "\n")
    return folder


def run(folder: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    arguments = ["--quick", "--device", "cpu", "--model", str(folder), "--out", str(out), *options]
    status = parity.main(parity.parser().parse_args(arguments))
    return status, json.loads((out / "parity.json").read_text())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that faults are put into, in float32."""
    used = {name: way for name, way in WAYS.items() if way in {f.way for f in FAULTS.values()}}
    monkeypatch.setattr(parity, "WAYS", used)
    monkeypatch.setattr(parity, "SETTINGS", [Setting(F32)])


@pytest.mark.usefixtures("few")
def test_it_passes_and_says_what_was_run(folder: Path, tmp_path: Path) -> None:
    status, results = run(folder, tmp_path, "--file", str(folder / "text"), "--seed", "3")
    assert status == 0
    assert results["machine"]["seed"] == 3
    assert results["machine"]["hf_paged"] == hf_paged.__version__
    assert results["machine"]["text"] == str(folder / "text")
    assert len(results[parity.CONTROLS]) == len(FAULTS)
    assert "offloaded, restored" in (tmp_path / "parity.md").read_text()
    assert (tmp_path / "parity.png").stat().st_size > 0


@pytest.mark.usefixtures("few")
def test_a_bug_fails_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write = LayerStorage.write
    monkeypatch.setattr(LayerStorage, "write", lambda self, s, k, v: write(self, s, k, 1.01 * v))
    assert run(folder, tmp_path, "--dataset", str(folder / "data"))[0] == 1
    assert "PagedCache, cpu, prefix hit: max log-prob" in capsys.readouterr().out


@pytest.mark.usefixtures("few")
def test_a_fault_that_is_not_caught_fails_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Harmless(PagedCaches):
        way = WAYS["prefix hit"]

    monkeypatch.setattr(parity, "FAULTS", {"none at all": Harmless})
    assert run(folder, tmp_path, "--file", str(folder / "text"))[0] == 1
    assert "none at all: float32, cpu: not caught" in capsys.readouterr().out


@pytest.mark.usefixtures("few")
def test_a_short_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("w3 w4 w5")
    with pytest.raises(ValueError, match="The text has 3 tokens, 3 windows of 64 need 192"):
        run(folder, tmp_path, "--file", str(tmp_path / "short"))
