"""The CUDA backend by contract: FlashInfer's own code on emulated kernels, without a GPU.

Models and tensors are on the CPU; `flashinfer_emulation` says what stands in for what.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import flashinfer_emulation
import numpy as np
import pytest
import torch
from conftest import ragged_ids, tiny
from flashinfer_emulation import Emulation
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import Case
from test_generate import CASES
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

import hf_paged.backends
from examples import small_model
from hf_paged import BlockPool, PagedCache
from hf_paged.backends import flashinfer as backend
from hf_paged.transfer import _packed, _views

BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The kernels are emulated in float64, so what differs is the rounding of the output.
TOLERANCE = {BF16: 8e-3, F16: 1e-3}
EXACT = "exact"  # the name of the reference attention below


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Iterator[Emulation]:
    """Emulated kernels, and a CPU that the backend takes for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        emulation = flashinfer_emulation.install(patch)
        patch.setattr(hf_paged.backends._FLASHINFER, "unavailable", lambda device: None)
        AttentionInterface.register(EXACT, exact_attention)
        AttentionMaskInterface.register(EXACT, full_mask)
        yield emulation


@pytest.fixture(autouse=True)
def runs(emulation: Emulation) -> list[Any]:
    """The kernels that a test runs."""
    emulation.runs.clear()
    emulation.merges = 0
    return emulation.runs


class FlashInferCase(Case):
    """Scattered blocks with poisoned slots, read by FlashInfer."""

    def __init__(self, past: list[int], new: int, **options: Any):
        super().__init__(past, new, **{"dtype": BF16, "backend": "flashinfer", **options})

    def check(self, **kwargs: Any) -> None:
        found, tolerance = self.attend(**kwargs), TOLERANCE[self.dtype]
        assert found.dtype == self.dtype
        expected = self.expected(**kwargs)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in float64, rounded where kernels round: the output, and again after sinks."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(t.double().repeat_interleave(group, 1) for t in (key, value))
    logits = q @ k.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~attention_mask, -1e300)
    lse = logits.logsumexp(-1, keepdim=True)
    out = ((logits - lse).exp() @ v).to(query.dtype)
    if s_aux is not None:
        share = torch.sigmoid(lse.float() - s_aux.float()[:, None, None])
        out = (out * share).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def full_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **kwargs)


# -- one attention call ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "heads", [(4, 4), (6, 2), (9, 3), (8, 2), (10, 2), (7, 1), (14, 2), (16, 1), (71, 1)], ids=str
)
@pytest.mark.parametrize("new", [1, 3, 20])
def test_dtypes_and_groups(
    runs: list[Any], dtype: torch.dtype, heads: tuple[int, int], new: int
) -> None:
    FlashInferCase([0, 1, 4, 5, 37], new, heads=heads, dtype=dtype).check()
    is_decode_on_cuda_cores = new == 1 and heads[0] // heads[1] < backend.TENSOR_CORE_GROUP
    assert [kind for kind, _ in runs] == ["decode" if is_decode_on_cuda_cores else "prefill"]


@pytest.mark.parametrize(
    "dims", [(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("new", [1, 9])
def test_head_dims_are_padded(dims: tuple[int, int], new: int) -> None:
    case = FlashInferCase([3, 40], new, dims=dims)
    case.check()
    storage = case.cache.pool.groups[0].storage[0]
    assert storage.padded_keys.shape[3] == min(d for d in (64, 128, 256) if d >= max(dims))
    assert (storage.keys.shape[3], storage.values.shape[3]) == dims


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 256])
@pytest.mark.parametrize("new", [1, 4])
def test_block_sizes(block_size: int, new: int) -> None:
    past = [block_size - 1, block_size, block_size + 1, 40]
    FlashInferCase(past, new, block_size=block_size).check()


@pytest.mark.parametrize("window", [1, 2, 4, 7, 8, 9, 64])
@pytest.mark.parametrize("new", [1, 3, 12])
@pytest.mark.parametrize("heads", [(6, 2), (8, 2)], ids=str)
def test_windows_across_block_borders(window: int, new: int, heads: tuple[int, int]) -> None:
    FlashInferCase([0, 1, 8, 9, 31], new, window=window, heads=heads).check()


@pytest.mark.parametrize("new", [1, 3, 12])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_scaling_and_softcap(new: int, window: int | None) -> None:
    FlashInferCase([2, 19], new, window=window).check(
        s_aux=torch.randn(6), scaling=0.7, softcap=1.5
    )


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("new", [1, 12])
def test_8_bit_keys_and_values(
    runs: list[Any], dtype: torch.dtype, kv_dtype: torch.dtype, new: int
) -> None:
    case = FlashInferCase([2, 19], new, dtype=dtype, kv_dtype=kv_dtype)
    case.check()
    assert case.cache.pool.groups[0].storage[0].keys.dtype == kv_dtype
    assert len(runs) == 1


def test_8_bit_keys_and_values_saturate() -> None:
    """A K or V beyond what 8 bits hold becomes the largest number, not NaN or infinity."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=8)
    for kv_dtype in (E4M3, E5M2):
        cache = PagedCache(pool=BlockPool(config, kv_dtype=kv_dtype), backend="flashinfer")
        states = torch.tensor([1e30, -1e30] * 4, dtype=BF16).view(1, 1, 1, 8)
        cache.update(states, states, 0)
        assert cache.layers[0].keys.float().abs().unique().tolist() == [torch.finfo(kv_dtype).max]


@given(
    past=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    new=st.integers(1, 12),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.integers(1, 130),
    block_size=st.integers(1, 20),
    window=st.none() | st.integers(1, 40),
    seed=st.integers(0, 100),
)
@settings(max_examples=100, deadline=None)
def test_any_shape(
    past: list[int],
    new: int,
    group: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    FlashInferCase(
        past,
        new,
        heads=(group * kv_heads, kv_heads),
        dims=(dim, dim),
        block_size=block_size,
        window=window,
        seed=seed,
    ).check()


# -- the choice of backend, and what it refuses ----------------------------------------------------


def test_another_dtype_or_head_dim_is_gathered_and_counted() -> None:
    models = {
        "float32, for which FlashInfer has no kernel": tiny("llama"),
        "a head_dim of 320, above 256": tiny("llama", head_dim=320).to(BF16),
    }
    for reason, model in models.items():
        model.set_attn_implementation("hf_paged")
        cache = PagedCache(config=model.config, backend="flashinfer")
        model.generate(**ragged_ids([9, 5]), past_key_values=cache, max_new_tokens=2)
        assert cache.report().dense_calls == {reason: 4 * 2}


def test_storage_of_another_backend_is_gathered_and_counted() -> None:
    """A pool whose K/V were first stored without padding serves FlashInfer all the same."""
    model = tiny("llama").to(BF16)
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model.config)
    for name, reasons in (
        ("cpu", set()),
        ("flashinfer", {"K/V stored by another backend, without FlashInfer's padding"}),
    ):
        cache = PagedCache(pool=pool, backend=name)
        model.generate(**ragged_ids([9, 5]), past_key_values=cache, max_new_tokens=2)
        assert set(cache.report().dense_calls) == reasons


def test_a_kernel_that_cannot_be_built_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import flashinfer

    tries = []

    def no_compiler(*args: Any) -> None:
        tries.append(args)
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(hf_paged.backends._FLASHINFER, "_failures", {})
    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", no_compiler)
    model = tiny("llama").to(BF16)
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, backend="flashinfer")
    inputs = ragged_ids([9, 5])
    model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    assert cache.report().dense_calls == {"FlashInfer failed with RuntimeError": 4 * 3}
    assert len(tries) == 1
    assert "Could not find nvcc" in caplog.text


def test_flashinfer_by_name_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hf_paged.backends._FLASHINFER, "unavailable")
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=8)
    states = torch.zeros(1, 1, 2, 8, dtype=BF16)
    cache = PagedCache(config=config, backend="flashinfer")
    with pytest.raises(RuntimeError, match="needs CUDA, and the K/V are on cpu; choose 'auto'"):
        cache.update(states, states, 0)
    assert cache.pool.num_used == 0
    cache = PagedCache(config=config)
    cache.update(states, states, 0)
    assert cache.report().backend == "cpu"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package flashinfer-python"):
        PagedCache(config=config, backend="flashinfer")


# -- plans -----------------------------------------------------------------------------------------


def test_a_step_is_planned_once_for_all_its_layers(emulation: Emulation) -> None:
    """... and a wrapper is never planned again right after its last plan."""
    model = tiny("gemma2").to(BF16)  # windows and full attention
    model.set_attn_implementation("hf_paged")
    emulation.order.clear()
    cache = PagedCache(config=model.config, backend="flashinfer")
    steps = 6
    model.generate(**ragged_ids([9, 5]), past_key_values=cache, max_new_tokens=steps)
    assert len(emulation.order) == 2 * steps
    assert len(emulation.runs) == 4 * steps
    plans = emulation.order
    for kind in ("prefill", "decode"):
        buffers = [buffer for name, buffer in plans if name == kind]
        assert all(one != other for one, other in itertools.pairwise(buffers))
        assert len(set(buffers)) <= 4  # two at a time, in turn


def test_a_turn_waits_for_its_last_plan_to_be_copied() -> None:
    """A wrapper's plan is copied from memory that the next plan overwrites."""
    stream, waited = backend._Stream(torch.device("cpu")), []
    turns = [stream.take("decode") for _ in range(3)]
    for turn in turns:
        turn.wait = lambda turn=turn: waited.append(turn)
        stream.give_back("decode", turn)
    assert [stream.take("decode") for _ in range(3)] == turns == waited


def test_caches_that_alternate_do_not_share_a_plan() -> None:
    cases = [FlashInferCase([3, 20], 1, seed=0), FlashInferCase([30, 7, 5], 1, seed=1)]
    for _ in range(2):
        for case in cases:
            case.check()


def test_a_step_without_tokens() -> None:
    """A forward of nothing but padding has no query, and FlashInfer would fail on none."""
    case = FlashInferCase([0, 0], 2)
    case.tokens[:] = False
    case.cache.reset()
    case.views = case._append(0, 2)
    assert not case.attend().any()


def test_packed_arrays_are_what_they_were() -> None:
    arrays = [np.arange(5), np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.arange(4)]
    views = _views(_packed(arrays, pin_memory=False), arrays)
    for view, array in zip(views, arrays, strict=True):
        assert np.array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype
        assert view.data_ptr() % 16 == 0


# -- generate --------------------------------------------------------------------------------------


def generate(model: PreTrainedModel, cache: Any, seed: int = 0, **kwargs: Any) -> Any:
    model.set_attn_implementation("hf_paged" if isinstance(cache, PagedCache) else EXACT)
    torch.manual_seed(seed)
    defaults = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    return model.generate(
        past_key_values=cache, return_dict_in_generate=True, **{**defaults, **kwargs}
    )


def both(model: PreTrainedModel, tolerance: float = 0.0, **kwargs: Any) -> PagedCache:
    """The same tokens and logits as a DynamicCache with attention that rounds alike."""
    expected = generate(model, DynamicCache(config=model.config), **copy.deepcopy(kwargs))
    cache = PagedCache(config=model.config, backend="flashinfer")
    found = generate(model, cache, **kwargs)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)
    assert torch.equal(found.sequences, expected.sequences)
    report = cache.report()
    assert report.backend == "flashinfer"
    assert report.dense_calls == {}
    cache.pool.check()
    return cache


@pytest.fixture(scope="module")
def low() -> Any:
    """SmolLM2-135M-Instruct in bfloat16 (9 heads, 3 K/V heads), and its tokenizer."""
    return small_model.load(dtype=BF16)


@pytest.fixture(scope="module")
def prompts(low: Any, text: str) -> dict[str, torch.Tensor]:
    """Eight prompts of 5 to 256 tokens, padded on the left."""
    _, tokenizer = low
    ids = tokenizer(text[:20000]).input_ids
    lengths = [5, 256, 31, 17, 64, 16, 128, 48]
    pieces = [ids[100 * i : 100 * i + n] for i, n in enumerate(lengths)]
    return tokenizer.pad({"input_ids": pieces}, return_tensors="pt")


@pytest.mark.parametrize("name", CASES)
def test_real_model(low: Any, prompts: Any, name: str) -> None:
    model, _ = low
    prompts = {key: value[::3, -64:] for key, value in prompts.items()}
    both(model, **prompts, **CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text"]
)
def test_architectures(model_type: str, name: str) -> None:
    model = tiny(model_type).to(BF16)
    both(model, **ragged_ids([30, 11, 3]), **CASES[name])
