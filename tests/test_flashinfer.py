"""The CUDA backend by contract: FlashInfer's own code on emulated kernels, without a GPU.

Models and tensors are on the CPU; `flashinfer_emulation` says what stands in for what.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashinfer_emulation
import numpy as np
import pytest
import torch
from conftest import TINY, ragged_ids, tiny
from flashinfer_emulation import Emulation
from hypothesis import given, settings
from test_attention import Case, any_case
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
from hf_paged.core.metadata import Pattern
from hf_paged.core.transfer import _packed, _views
from hf_paged.mask import paged_mask
from hf_paged.view import LazyMask

BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The kernels are emulated in float64, so what differs is the rounding of the output.
TOLERANCE = {BF16: 8e-3, F16: 1e-3}
EXACT = "exact"  # the name of the reference attention below


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Iterator[Emulation]:
    """Emulated kernels, and a CPU that the backend takes for a GPU, in every test."""
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
    storage.grow(100)
    assert not storage.padded_keys[..., dims[0] :].any()  # the kernels multiply by these


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


@given(case=any_case(FlashInferCase, most_group=9, most_dim=130))
@settings(max_examples=100, deadline=None)
def test_any_shape(case: Case) -> None:
    case.check()


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


def test_a_home_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    """FlashInfer keeps its kernels there and fails in its import, without saying what to set."""
    blocked = tmp_path / "file"
    blocked.touch()  # no user, root included, makes a folder of it
    script = (
        "import conftest, hf_paged, torch\n"
        "hf_paged.backends._FLASHINFER.unavailable = lambda device: None\n"
        "model = conftest.tiny('llama').bfloat16()\n"
        "model.set_attn_implementation('hf_paged')\n"
        "cache = hf_paged.PagedCache(config=model.config, backend='flashinfer')\n"
        "model(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)\n"
        "print(cache.report().dense_calls)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ
        | {"HOME": str(blocked), "FLASHINFER_WORKSPACE_BASE": str(blocked)}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "{'FlashInfer failed with NotADirectoryError': 4}\n", done.stderr
    assert done.stderr.count("set FLASHINFER_WORKSPACE_BASE to a folder") == 1


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


def test_auto_is_flashinfer_on_cuda_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hf_paged.backends._FLASHINFER
    cuda = torch.device("cuda", 0)
    assert hf_paged.backends.backend_for("auto", cuda) is found
    assert hf_paged.backends.backend_for("auto", torch.device("cpu")).name == "cpu"
    monkeypatch.delattr(found, "unavailable")
    for capability, reason in (((9, 0), None), ((7, 5), "the GPU is older than FlashInfer's")):
        backend._unavailable.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        chosen = hf_paged.backends.backend_for("auto", cuda)
        assert chosen is found if reason is None else chosen.startswith(reason)
    backend._unavailable.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in hf_paged.backends.backend_for("auto", cuda)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "needs CUDA" in hf_paged.backends.backend_for("auto", cuda)
    backend._unavailable.cache_clear()


# -- plans -----------------------------------------------------------------------------------------


def test_a_step_is_planned_once_for_all_its_layers(emulation: Emulation) -> None:
    model = tiny("gemma2").to(BF16)  # windows and full attention
    model.set_attn_implementation("hf_paged")
    emulation.order.clear()
    cache = PagedCache(config=model.config, backend="flashinfer")
    steps = 6
    model.generate(**ragged_ids([9, 5]), past_key_values=cache, max_new_tokens=steps)
    assert len(emulation.order) == 2 * steps
    assert len(emulation.runs) == 4 * steps


def test_a_wrapper_is_not_planned_again_before_its_plan_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan is copied from host memory that the next plan of the same wrapper overwrites."""
    copied, waited = set(), []
    monkeypatch.setattr(backend._Turn, "is_copied", lambda turn: turn in copied)
    monkeypatch.setattr(backend._Turn, "wait", lambda turn: waited.append(turn))
    stream = backend._Stream(torch.device("cpu"))
    turns = []
    for _ in range(backend.MAX_WRAPPERS):  # the device has not got to any of them
        turns.append(stream.take("decode"))
        stream.give_back("decode", turns[-1])
    assert len(set(turns)) == backend.MAX_WRAPPERS
    again = stream.take("decode")
    assert again is turns[0]  # there are enough, so the oldest is waited for
    assert waited[-1] is again
    copied.update(turns)
    stream.give_back("decode", again)
    assert [stream.take("decode") for _ in turns] == [*turns[1:], turns[0]]
    assert stream.take("decode") not in turns  # those are all in use


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


def test_layers_on_several_devices() -> None:
    """Blocks, index arrays and workspaces are per device; "meta" stands for a second GPU."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=32)
    config._attn_implementation = "hf_paged"  # or it gives out ordinary tensors
    cache = PagedCache(config=config, block_size=4, backend="flashinfer")
    states = torch.randn(1, 2, 7, 16).to(BF16)

    def update(cache: PagedCache, columns: slice) -> None:
        for layer, device in enumerate(["cpu", "meta"]):
            new = states[:, :, columns].to(device)
            metadata = cache.update(new, new, layer)[0].pages.states.metadata
            [slots] = metadata.indices(new.device)
            assert slots.device.type == device
            assert metadata.indices(new.device)[0] is slots

    update(cache, slice(0, 6))
    fork = cache.fork()
    update(fork, slice(6, 7))  # writes to a copy of the last block, on both devices
    update(cache, slice(0, 1))
    assert torch.equal(fork.layers[0].keys, states)
    assert torch.equal(cache.layers[0].keys[:, :, 6:], states[:, :, :1])
    assert cache.pool.stats()["copies"] == 1
    storage = cache.pool.groups[0].storage
    assert [storage[layer].keys.device.type for layer in range(2)] == ["cpu", "meta"]
    streams = [hf_paged.backends._FLASHINFER._stream(torch.device(d)) for d in ("cpu", "meta")]
    assert [stream._workspace.device.type for stream in streams] == ["cpu", "meta"]


def test_packed_arrays_are_what_they_were() -> None:
    arrays = [np.arange(5), np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.arange(4)]
    views = _views(_packed(arrays, pin_memory=False), arrays)
    for view, array in zip(views, arrays, strict=True):
        assert np.array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype
        assert view.data_ptr() % 16 == 0


def test_memory_of_the_host_is_there_whatever_the_default_device_is() -> None:
    """ "meta" stands for a GPU, where memory cannot be pinned."""
    with torch.device("meta"):
        assert _packed([np.arange(5)], pin_memory=False).device.type == "cpu"


def test_which_masks_are_chunked_is_known_without_asking_one() -> None:
    """Asked on the device, the host would wait; and a mask may hold the padding there."""

    def asked(*args: Any) -> None:
        raise AssertionError

    model = tiny("llama4_text")
    length, offset = PagedCache(config=model.config).get_mask_sizes(12, 0)
    mask = paged_mask(
        2, 12, length, 0, offset, mask_function=asked, local_size=8, config=model.config
    )
    assert isinstance(mask, LazyMask)
    assert mask.facts.pattern == Pattern("chunked", 8)


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
    """The first layers of SmolLM2-135M-Instruct in bfloat16 (9 and 3 heads), and its tokenizer."""
    model, tokenizer = small_model.load(dtype=BF16)
    return first_layers(model, 4), tokenizer


def first_layers(model: Any, layers: int) -> Any:
    model = copy.deepcopy(model)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers, model.config.layer_types = layers, None
    return model


@pytest.fixture(scope="module")
def prompts(low: Any, text: str) -> dict[str, torch.Tensor]:
    """Prompts of 5, 17 and 64 tokens, padded on the left."""
    ids = low[1](text[:20000]).input_ids
    pieces = [ids[100 * i : 100 * i + n] for i, n in enumerate([5, 17, 64])]
    return low[1].pad({"input_ids": pieces}, return_tensors="pt")


@pytest.mark.parametrize("name", CASES)
def test_every_way_of_generate(low: Any, prompts: Any, name: str) -> None:
    both(low[0], **prompts, **CASES[name])


@pytest.mark.parametrize("name", ["greedy", "beams", "chunked prefill"])
@pytest.mark.parametrize("model_type", TINY)
def test_architectures(model_type: str, name: str) -> None:
    """Windows, softcaps, sinks, chunks; prompts that are longer than a window or a chunk."""
    model = tiny(model_type).to(BF16)
    both(model, **ragged_ids([30, 11, 3]), **{**CASES[name], "max_new_tokens": 10})


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    "shape", [(5, 1, 80), (7, 1, 96), (4, 4, 128), (8, 2, 16)], ids=str
)  # heads, kv_heads, head_dim
def test_groups_and_head_dims(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    model = tiny("llama", num_hidden_layers=2, hidden_size=8 * heads, **sizes).to(dtype)
    cache = both(model, **ragged_ids([20, 9]))
    # What a DynamicCache would hold is not padded.
    row = 2 * 2 * kv_heads * dim * 2
    assert cache.report().dense_bytes == 2 * cache.get_seq_length() * row


def test_prompt_lookup(low: Any, text: str) -> None:
    ids = low[1](text[:2000], return_tensors="pt").input_ids[:, :40]
    both(
        low[0],
        input_ids=torch.cat([ids, ids], dim=1),
        prompt_lookup_num_tokens=4,
        max_new_tokens=16,
    )


@pytest.mark.parametrize("layers", [4, 3], ids=["all accepted", "some accepted"])
def test_assisted_decoding(low: Any, text: str, layers: int) -> None:
    ids = low[1](text[300:700], return_tensors="pt").input_ids
    both(
        low[0],
        input_ids=ids,
        assistant_model=first_layers(low[0], layers),
        max_new_tokens=12,
    )


@pytest.mark.parametrize("model_type", ["llama", "mistral", "llama4_text"])
def test_padding_between_tokens(model_type: str) -> None:
    """A batch that goes on with more left-padded text: windows and chunks then are irregular."""
    model = tiny(model_type).to(BF16)
    outs = []
    caches = [
        PagedCache(config=model.config, backend="flashinfer"),
        DynamicCache(config=model.config),
    ]
    for cache in caches:
        inputs = ragged_ids([9, 5, 14])
        for lengths in ([3, 6, 1], [7, 2, 4]):
            out = generate(model, cache, **inputs, max_new_tokens=5)
            grown = out.sequences.shape[1] - inputs["attention_mask"].shape[1]
            more = ragged_ids(lengths, seed=1)
            mask = torch.nn.functional.pad(inputs["attention_mask"], (0, grown), value=1)
            inputs = {
                "input_ids": torch.cat([out.sequences, more["input_ids"]], dim=1),
                "attention_mask": torch.cat([mask, more["attention_mask"]], dim=1),
            }
        outs.append(out)
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for mine, theirs in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    assert caches[0].report().dense_calls == {}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("new", [1, 5])
def test_hidden_tokens(model_type: str, new: int) -> None:
    """Stored tokens that a mask hides, at a row's end or among others, gather nothing."""
    model = tiny(model_type).to(BF16)
    outs = []
    for attention, cache in (
        ("hf_paged", PagedCache(config=model.config, block_size=3, backend="flashinfer")),
        (EXACT, DynamicCache(config=model.config)),
    ):
        model.set_attn_implementation(attention)
        ids, mask = ragged_ids([9, 5, 14]).values()
        logits = []
        for step in range(4):
            with torch.no_grad():
                out = model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                    past_key_values=cache,
                )
            logits.append(out.logits[:, -new:])
            if step == 0:
                mask[0, 8] = mask[2, 4:7] = mask[1, -2:] = 0
            mask = torch.nn.functional.pad(mask, (0, new), value=1)
            ids = 5 + torch.arange(3 * new).view(3, new) + step
        outs.append(torch.cat(logits, 1))
        if isinstance(cache, PagedCache):
            assert not cache.report().dense_calls
            assert cache.row_lengths == (mask.sum(1) - new + torch.tensor([1, 0, 3])).tolist()
    torch.testing.assert_close(*outs, atol=0, rtol=0)


def test_8_bit_keys_and_values_of_a_model() -> None:
    """Close to the model's own, and no closer than 8 bits allow."""
    model = tiny("llama").to(BF16)
    inputs = ragged_ids([20, 9])
    expected = generate(model, DynamicCache(config=model.config), **inputs, max_new_tokens=1)
    pool = BlockPool(model.config, kv_dtype=E4M3)
    cache = PagedCache(pool=pool, backend="flashinfer")
    found = generate(model, cache, **inputs, max_new_tokens=1)
    assert cache.report().dense_calls == {}
    error = (found.logits[0] - expected.logits[0]).abs().max() / expected.logits[0].abs().max()
    assert 1e-3 < error < 0.2
    assert cache.report().bytes == 2 * 3 * 16 * 4 * 2 * 64  # 1 byte of K and V, padded to 64


# -- a shared beginning is read once ---------------------------------------------------------------


@pytest.fixture
def cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models read too little for a cascade to pay."""
    monkeypatch.setattr(backend, "CASCADE_MIN_BYTES", 1)
    monkeypatch.setattr(backend, "CASCADE_MIN_SHARE", 0)


def cascade_steps(runs: list[Any]) -> int:
    return sum(kind == "prefill" and not plan.is_causal for kind, plan in runs)


@pytest.mark.parametrize("kwargs", [CASES["beams"], CASES["return sequences"]], ids=str)
def test_beams_and_samples_read_their_prompt_once(
    cascade: None, emulation: Emulation, kwargs: dict[str, Any]
) -> None:
    model, inputs = tiny("llama").to(F16), ragged_ids([70, 40])
    expected = generate(model, DynamicCache(config=model.config), **inputs, **kwargs)
    cache = PagedCache(config=model.config, backend="flashinfer")
    found = generate(model, cache, **inputs, **kwargs)
    # Merging rounds once more than a single pass.
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.06, rtol=0)
    assert torch.equal(found.sequences, expected.sequences)
    assert cascade_steps(emulation.runs) == emulation.merges == 4 * 7
    shared = next(plan for kind, plan in emulation.runs if kind == "prefill" and not plan.is_causal)
    assert shared.indptr.tolist() == [0, 4, 6]  # the whole blocks of the two prompts
    assert shared.qo_indptr.tolist() == [0, found.logits[1].shape[0] // 2, found.logits[1].shape[0]]


def forked(prompt: int, rows: int, new: list[int]) -> FlashInferCase:
    """One row of `prompt` tokens forked to `rows`, each of which has a few tokens of its own."""
    case = FlashInferCase([prompt] * (3 * rows), 1, block_size=4)
    case.cache.crop(-1)
    case.cache.batch_select_indices(torch.zeros(rows, dtype=torch.long))
    case.past, case.new = [prompt] * rows, 1
    case.query = torch.randn(rows, 6, 1, 16).to(BF16)
    more = max(new) + 1
    for name in ("keys", "values"):
        own = torch.randn(rows, 2, more, 16).to(BF16)
        states = getattr(case, name)[:1, :, :prompt].expand(rows, -1, -1, -1)
        setattr(case, name, torch.cat([states, own], dim=2))
    case.tokens = torch.ones(rows, prompt + more, dtype=torch.bool)
    for row, count in enumerate(new):
        case.tokens[row, prompt : prompt + max(new) - count] = False
    if max(new):
        case._append(prompt, prompt + max(new))
    case.views = case._append(prompt + max(new), prompt + more)
    return case


@pytest.mark.parametrize("prompt", [5, 7, 8, 30])
@pytest.mark.parametrize("new", [[0, 0], [1, 4, 0], [9, 2, 3, 3]], ids=str)
def test_a_cascade_is_exact(
    cascade: None, emulation: Emulation, prompt: int, new: list[int]
) -> None:
    case = forked(prompt, len(new), new)
    case.check()
    case.check(s_aux=torch.randn(6), softcap=2.0)
    assert emulation.merges == 2


def test_when_a_cascade_pays(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    case = forked(30, 4, [1, 2, 3, 4])
    case.check()
    assert emulation.merges == 0  # a few KiB are saved
    saved = 3 * 28 * 2 * 2 * 64 * 2  # rows, tokens, K and V, heads, padded head_dim, bytes
    for limit, merges in ((saved, 1), (saved + 1, 0)):
        monkeypatch.setattr(backend, "CASCADE_MIN_BYTES", limit)
        emulation.merges = 0
        case.cache.crop(-1)
        case.views = case._append(case.keys.shape[2] - 1, case.keys.shape[2])  # the step again
        case.attend()
        assert emulation.merges == merges


def test_no_cascade_through_a_window(cascade: None, emulation: Emulation) -> None:
    """A window counts from the end of what a pass reads."""
    model = tiny("gemma2").to(BF16)
    both(model, 0.15, **ragged_ids([40]), **CASES["beams"])
    # Only the two layers with full attention, in each step but the first.
    assert cascade_steps(emulation.runs) == emulation.merges == 2 * 7
    emulation.merges = 0
    both(tiny("mistral", sliding_window=512).to(BF16), **ragged_ids([40]), **CASES["beams"])
    assert emulation.merges == 0
