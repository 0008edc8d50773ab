"""evals/gpu_check.py without a GPU: its cases and ways on small sizes, with emulated kernels."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flashinfer_emulation
import pytest
import torch
from flashinfer_emulation import Emulation

import hf_paged.backends
from evals import gpu_check


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Iterator[Emulation]:
    """A CPU that is taken for a GPU, and a clock for its events."""

    def milliseconds(call: Callable[[], Any], rounds: int = 1) -> tuple[float, float]:
        start = time.perf_counter()
        call()
        spent = (time.perf_counter() - start) * 1e3
        return spent, spent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_paged.backends._FLASHINFER, "unavailable", lambda device: None)
        patch.setattr(gpu_check, "DEVICE", "cpu")
        patch.setattr(gpu_check, "milliseconds", milliseconds)
        for name in ("set_sync_debug_mode", "reset_peak_memory_stats", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *args: None)
        for name in ("memory_allocated", "max_memory_allocated"):
            patch.setattr(torch.cuda, name, lambda: 0)
        yield flashinfer_emulation.install(patch)


def small(case: gpu_check.Case) -> gpu_check.Case:
    """The same in a hundredth of the size."""
    past = tuple(min(n, 40) for n in case.past)
    window = case.window and 12
    return dataclasses.replace(case, past=past, new=min(case.new, 20), window=window)


@pytest.mark.parametrize("case", gpu_check.CASES, ids=str)
def test_the_reference_agrees_with_every_case(
    case: gpu_check.Case, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check.backend, "CASCADE_MIN_BYTES", 1 if case.is_fork else 1 << 40)
    emulation.merges = 0
    assert 0 < gpu_check.attention_error(small(case)) < 1
    assert emulation.merges == case.is_fork


@pytest.mark.parametrize("model_type", gpu_check.MODELS)
def test_models_agree(model_type: str) -> None:
    with torch.no_grad():
        assert 0 < gpu_check.model_error(model_type) < 1


def test_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = flashinfer_emulation.attention
    monkeypatch.setattr(flashinfer_emulation, "attention", lambda *a: exact(*a[:-1], a[-1] * 1.05))
    assert gpu_check.attention_error(small(gpu_check.CASES[0])) > 1


def test_the_kernels_that_are_prebuilt_are_those_that_run(emulation: Emulation) -> None:
    flashinfer_emulation.clear_modules()
    emulation.modules.clear()
    for case in gpu_check.CASES:
        gpu_check.attention_error(small(case))
    # As built: kind, query, K/V, output and index dtype, head dims, rope, window, softcap.
    built = {(*module[:3], module[5], *module[8:10]) for module in emulation.modules}
    assert built == set(gpu_check.kernels())


def test_every_way_runs_on_a_small_model() -> None:
    model = gpu_check.random_llama(2, 64, (4, 2))
    with torch.no_grad():
        steps = list(gpu_check.decode_steps(model, 2, 20))
        assert [row["case"] for row in steps] == [
            f"2x20, {way}" for way in gpu_check.ways(model, 9)
        ]
        row = gpu_check.decode_kernel((8, 2), 64, 2, 20, bandwidth=1e9)
        assert row["GB/s"] == pytest.approx(row["of copy bandwidth"])
        rows = list(gpu_check.beams(model, tokens=40, new=3))
    assert len(rows) == 4
    assert all(row["s"] > 0 for row in rows)


def test_a_failure_keeps_the_rows_in_front_of_it() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"case": "a", "ms": 1.0}
        raise ValueError("no kernel\nand more")

    found = gpu_check.collected(rows())
    assert found == [
        {"case": "a", "ms": 1.0},
        {"case": "failed: ValueError: no kernel", "ms": ""},
    ]


def test_the_largest_that_fits() -> None:
    for limit in (0, 1, 7, 8, 9, 100):
        found = gpu_check.largest(lambda n, limit=limit: n <= limit, 8)
        assert found <= limit
        assert limit - found <= max(limit // 8, 1)


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, gpu_check.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "needs a CUDA device; --prebuild builds its kernels without one."
    )
