"""The backends against the dense reference in float64, on scattered blocks with poisoned slots."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ragged_ids, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig

from examples import small_model
from hf_paged import BlockPool, PagedCache
from hf_paged.attention import paged_attention
from hf_paged.backends.cpu import runner
from hf_paged.backends.dense import reference_attention
from hf_paged.core.metadata import MaskFacts, Pattern
from hf_paged.mask import paged_mask
from hf_paged.view import LazyMask

# About twice what torch's own attention is off by, on the same inputs.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Layer(torch.nn.Module):
    """As much of an attention layer as an attention function reads."""

    is_causal = True


class Case:
    """Rows with `past` tokens in blocks all over the pool, and a step of `new` tokens more.

    Every slot that holds no token is NaN, in the blocks that are held and in those that are not.
    """

    def __init__(
        self,
        past: list[int],
        new: int,
        *,
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (16, 16),
        block_size: int = 4,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        backend: str = "auto",
        seed: int = 0,
    ):
        torch.manual_seed(seed)
        self.past, self.new, self.window, self.dtype = past, new, window, dtype
        rows, columns = len(past), max(past) + new
        config = LlamaConfig(
            num_hidden_layers=1,
            num_attention_heads=heads[1],
            hidden_size=heads[1] * 8,
            layer_types=["sliding_attention" if window else "full_attention"],
            sliding_window=window,
        )
        blocks = sum(-(-(n + new) // block_size) for n in past)
        pool = BlockPool(config, block_size=block_size, num_blocks=2 * blocks, kv_dtype=kv_dtype)
        self.cache = PagedCache(pool=pool, backend=backend)
        pool.groups[0]._free = np.random.default_rng(seed).permutation(pool.groups[0].capacity)
        self.query = torch.randn(rows, heads[0], new, dims[0]).to(dtype)
        self.keys, self.values = (
            torch.randn(rows, heads[1], columns, dim).to(dtype) for dim in dims
        )
        storage = pool.storage.of_layer(0, self.keys, self.values, self.cache.state.stored_dims)
        storage.keys.fill_(torch.nan)
        storage.values.fill_(torch.nan)
        self.tokens = torch.arange(columns) >= max(past) - torch.tensor(past)[:, None]
        if max(past):
            self._append(0, max(past))
        self.views = self._append(max(past), columns)

    def _append(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        length, offset = self.cache.get_mask_sizes(stop - start, 0)
        seen = self.tokens[:, :stop]
        mask = paged_mask(len(seen), stop - start, length, start, offset, attention_mask=seen)
        assert isinstance(mask, LazyMask)  # and alive, as in a forward
        return self.cache.update(self.keys[:, :, start:stop], self.values[:, :, start:stop], 0)

    def attend(self, **kwargs: Any) -> torch.Tensor:
        """[rows, new, heads, dim], through the function that transformers calls."""
        view = self.views[0]
        metadata = view.pages.states.metadata
        facts = MaskFacts(len(self.query), self.new, metadata.kv_length, metadata.kv_offset)
        facts.pattern = Pattern() if self.window is None else Pattern("sliding", self.window)
        mask = LazyMask(facts, torch.bool, "cpu", lambda: None)
        out, _ = paged_attention(Layer(), self.query, *self.views, mask, **kwargs)
        assert self.cache.report().dense_calls == {}
        return out

    def stored(self, states: torch.Tensor) -> torch.Tensor:
        """K or V in float64 as they are after storing."""
        return states.to(self.cache.pool.storage.kv_dtype or self.dtype).double()

    def expected(self, **kwargs: Any) -> torch.Tensor:
        columns = torch.arange(self.keys.shape[2])
        query = columns[-self.new :, None]
        visible = columns <= query
        if self.window is not None:
            visible &= columns > query - self.window
        if "s_aux" in kwargs:
            kwargs["sinks"] = kwargs.pop("s_aux").double()
        return reference_attention(
            self.query.double(),
            self.stored(self.keys),
            self.stored(self.values),
            visible & self.tokens[:, None, None],
            **kwargs,
        )[0]

    def check(self, **kwargs: Any) -> None:
        found = self.attend(**kwargs)
        assert found.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(
            found.double(), self.expected(**kwargs), atol=tolerance, rtol=tolerance
        )


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """So that the work of the kernel is split between them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The compiled kernel, and torch's attention as where the kernel cannot run."""
    if request.param == "torch":
        monkeypatch.setattr(runner, "unavailable", lambda: "switched off by a test")
    else:
        assert runner.unavailable() is None
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3), (7, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("new", [1, 3, 20])
def test_dtypes_and_groups(way: str, dtype: torch.dtype, heads: tuple[int, int], new: int) -> None:
    Case([0, 1, 4, 5, 37], new, heads=heads, dtype=dtype).check()


@pytest.mark.parametrize("dims", [(8, 8), (20, 20), (64, 64), (80, 80), (24, 16), (1, 1)], ids=str)
@pytest.mark.parametrize("new", [1, 9])
def test_head_dims(way: str, dims: tuple[int, int], new: int) -> None:
    Case([3, 40], new, dims=dims).check()


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 256])
def test_block_sizes(way: str, block_size: int) -> None:
    Case([block_size - 1, block_size, block_size + 1, 40], 1, block_size=block_size).check()


@pytest.mark.parametrize("window", [1, 2, 4, 7, 8, 9, 64])
@pytest.mark.parametrize("new", [1, 3, 12])
def test_windows_across_block_borders(way: str, window: int, new: int) -> None:
    Case([0, 1, 8, 9, 31], new, window=window).check()


@pytest.mark.parametrize("new", [1, 3, 12])
def test_sinks_and_scaling(way: str, new: int) -> None:
    Case([2, 19], new).check(s_aux=torch.randn(6), scaling=0.7)


@pytest.mark.parametrize("new", [1, 3, 12])
def test_softcap(new: int) -> None:
    """Only the kernel knows a softcap, for any number of queries."""
    Case([2, 19], new).check(softcap=1.5)


def test_a_long_row_is_split_and_merged(way: str) -> None:
    Case([3000, 700, 1], 1, block_size=16).check()
    Case([3000, 700, 1], 1, block_size=16, window=600).check(s_aux=torch.randn(6))


def any_case(kind: type[Case], most_group: int, most_dim: int) -> st.SearchStrategy[Case]:
    """Cases of any shape, with up to `most_group` heads a K/V head."""

    def make(group: int, kv_heads: int, dim: int, **kwargs: Any) -> Case:
        return kind(heads=(group * kv_heads, kv_heads), dims=(dim, dim), **kwargs)

    return st.builds(
        make,
        past=st.lists(st.integers(0, 70), min_size=1, max_size=5),
        new=st.integers(1, 12),
        group=st.integers(1, most_group),
        kv_heads=st.integers(1, 3),
        dim=st.integers(1, most_dim),
        block_size=st.integers(1, 20),
        window=st.none() | st.integers(1, 40),
        seed=st.integers(0, 100),
    )


@given(case=any_case(Case, most_group=5, most_dim=40))
@settings(max_examples=150, deadline=None)
def test_any_shape(case: Case) -> None:
    case.check()


def test_same_input_gives_the_same_bits() -> None:
    case = Case([500, 3, 90], 1)
    first = case.attend()
    assert all(torch.equal(case.attend(), first) for _ in range(5))


def test_another_number_of_threads_is_within_tolerance() -> None:
    case = Case([2000, 3, 90], 1)
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(case.attend())
    torch.testing.assert_close(outs[0], outs[1], atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_stays_in_its_row(way: str, bad: float) -> None:
    case = Case([20, 20, 20], 1)
    good = case.attend().clone()
    table = case.cache.block_tables
    case.cache.pool.groups[0].storage[0].values[table[1][2]] = bad
    found = case.attend()
    assert torch.equal(found[[0, 2]], good[[0, 2]])
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["query", "keys", "values"])
@pytest.mark.parametrize("token", [2, 599])
def test_a_bad_value_is_not_passed_over(way: str, what: str, bad: float, token: int) -> None:
    """It makes NaN of what attention in float64 makes NaN of, and of nothing else."""
    case = Case([600, 20], 1, heads=(8, 2))
    if what == "query":
        case.query[0, 5, 0, 3] = bad
    else:
        block, storage = case.cache.block_tables[0][token // 4], case.cache.pool.groups[0].storage
        getattr(case, what)[0, 1, token, 3] = bad
        getattr(storage[0], what)[block, token % 4, 1, 3] = bad
    expected = case.expected()
    assert not expected[0].isfinite().all()
    torch.testing.assert_close(
        case.attend().double(), expected, atol=3e-6, rtol=3e-6, equal_nan=True
    )


def test_two_threads_generate_at_once() -> None:
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    inputs = [ragged_ids([30, 11], seed=seed) for seed in range(2)]

    def run(index: int) -> torch.Tensor:
        cache = PagedCache(config=model.config)
        return model.generate(**inputs[index], past_key_values=cache, max_new_tokens=20)

    alone = [run(index) for index in range(2)]
    together: dict[int, torch.Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.__setitem__(i, run(i))) for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[index], alone[index]) for index in range(2))


def _attend_in_child(case: Case, queue: Any) -> None:
    queue.put((case.attend().numpy(), runner.unavailable()))


def test_a_forked_child_runs_the_kernel_on_its_one_thread() -> None:
    case = Case([2000, 3], 1)  # more than one task
    expected = case.attend()  # starts the threads that a child does not inherit
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_attend_in_child, args=(case, queue))
    child.start()
    found, reason = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert reason is None
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=3e-6, rtol=3e-6)


def test_without_numba_torch_serves_and_says_so_once() -> None:
    script = (
        "import sys; sys.modules['numba'] = None; sys.path[:0] = ['tests', '.']\n"
        "import test_attention as t\n"
        "t.Case([20, 3], 1).check(); t.Case([20, 3], 2).check()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("Numba is not installed") == 1


def test_an_install_that_cannot_be_written_keeps_the_kernel(tmp_path: Path) -> None:
    """Numba found no folder for it, which turned it off: "it does not run on this machine"."""
    package = Path(runner.__file__).parents[2]
    copied = tmp_path / package.name
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    # No user, root included, makes a folder of a file.
    blocked = copied / "backends" / "cpu" / "__pycache__"
    blocked.touch()
    variables = ("HOME", "XDG_CACHE_HOME", "TMPDIR", "NUMBA_CACHE_DIR")
    script = (
        "import test_attention as t; t.Case([20, 3], 1).check(); t.Case([20, 3], 1).check()\n"
        "assert t.runner._function.cache_info().currsize == 1, t.runner.unavailable()\n"
        f"assert t.runner.__file__.startswith({str(copied)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd="/proc" if os.path.isdir("/proc") else None,
        env=os.environ
        | dict.fromkeys(variables, str(blocked))
        | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


def test_a_damaged_file_of_the_kernel_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is on disk may be of a full disk or of another user; it turned the kernel off too."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    kernel = runner._kernel()
    kernel.compiled(torch.float16, is_kept=True)
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(b"not an index")
    monkeypatch.setattr(runner, "_failures", [])
    runner._function.cache_clear()
    Case([20, 3], 1, dtype=torch.float16).check()
    runner._function.cache_clear()
    assert runner.unavailable() is None
    assert caplog.text.count("set NUMBA_CACHE_DIR") == 1


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("new", [1, 3, 20])
def test_a_softcap_where_the_kernel_turns_out_not_to_run(
    new: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is known after its first call, which torch's attention without a softcap took over."""

    def failing(dtype: torch.dtype) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(runner, "_function", failing)
    monkeypatch.setattr(runner, "_failures", [])
    Case([0, 1, 8, 9, 31], new, heads=(4, 2), window=window).check(softcap=0.3, s_aux=torch.ones(4))


def test_import_does_not_load_numba() -> None:
    script = "import sys, hf_paged; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_backend_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    inputs = ragged_ids([9, 5])
    outs = [
        model.generate(
            **inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=4
        )
    ]
    for backend, variable in (("cpu", None), ("dense", None), ("auto", "dense")):
        if variable:
            monkeypatch.setenv("HF_PAGED_BACKEND", variable)
        cache = PagedCache(config=model.config, backend=backend)
        outs.append(model.generate(**inputs, past_key_values=cache, max_new_tokens=4))
        report = cache.report()
        is_dense = "dense" in (backend, variable)
        assert (report.paged_calls == 0) == (sum(report.dense_calls.values()) > 0) == is_dense
        assert report.backend == ("dense" if is_dense else "cpu")
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_on_a_real_model_is_no_worse_than_torch(
    real: Any, text: str, dtype: torch.dtype
) -> None:
    """Judged against the float32 model: top-1 agreement and KL, decoding token by token.

    Two of torch's own ways differ by rounding alone: the worse of them is the bar, within what 64
    positions can tell.
    """
    model, tokenizer = real
    low, _ = small_model.load(dtype=dtype)
    ids = tokenizer(text[:3000], return_tensors="pt").input_ids[:, :160]

    def log_probs(model: Any, attention: str, cache: Any) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits = [model(input_ids=ids[:, :96], past_key_values=cache).logits[:, -1:]]
            logits += [
                model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits
                for i in range(96, 159)
            ]
        return torch.cat(logits, 1).float().log_softmax(-1)

    exact = log_probs(model, "sdpa", DynamicCache(config=model.config))
    paged = log_probs(low, "hf_paged", PagedCache(config=low.config))
    torchs = [
        log_probs(low, attention, DynamicCache(config=low.config))
        for attention in ("sdpa", "eager")
    ]
    found = [
        (
            (exact.exp() * (exact - other)).sum(-1),
            (exact.argmax(-1) == other.argmax(-1)).double().mean(),
        )
        for other in (paged, *torchs)
    ]
    divergence, agreement = zip(*found, strict=True)
    worst = max(divergence[1:], key=torch.Tensor.mean)
    excess = divergence[0] - 1.2 * worst
    assert excess.mean() <= 2 * excess.std() / excess.numel() ** 0.5
    assert agreement[0] >= min(agreement[1:]) - 0.02
