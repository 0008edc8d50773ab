"""Layers that differ in what they look back on: windows, softcaps, sinks, chunks, and mixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TINY, ragged_ids, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_paged import PagedCache

Build = Callable[[str], PreTrainedModel]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 30},
    "beams": {"num_beams": 3, "max_new_tokens": 20},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 20},
    "chunked prefill": {"prefill_chunk_size": 5, "max_new_tokens": 12},
}


def generate(model: PreTrainedModel, attention: str, cache: Any, **kwargs: Any) -> Any:
    model.set_attn_implementation(attention)
    torch.manual_seed(0)
    return model.generate(
        past_key_values=cache,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **kwargs},
    )


def compare(model: PreTrainedModel, **kwargs: Any) -> PagedCache:
    expected = generate(model, "eager", DynamicCache(config=model.config), **kwargs)
    cache = PagedCache(config=model.config, block_size=4)
    found = generate(model, "hf_paged", cache, **kwargs)
    assert torch.equal(found.sequences, expected.sequences)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    cache.pool.check()
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TINY)
def test_equals_dynamic_cache_past_the_window(tiny_model: Build, name: str, kind: str) -> None:
    model = tiny_model(name)
    cache = compare(model, **ragged_ids([3, 21, 9]), **KINDS[kind])
    for index, group in enumerate(cache.pool.groups):
        if group.window is not None:
            # The window's own tokens straddle at most this many blocks, and the last step's one.
            bound = -(-group.window // 4) + 2
            held = (cache.state.tables.tables[index] >= 0).sum(1)
            assert held.max() <= bound
    # Only the softcap keeps a long prompt from the blocks, not windows, chunks or sinks.
    assert all(reason.startswith("softcap") for reason in cache.report().dense_calls)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("assistant", ["alike", "other"])
def test_assisted_decoding_rolls_back_windows(tiny_model: Build, name: str, assistant: str) -> None:
    """Many candidates accepted (the same weights with a wide window), and nearly none."""
    model = tiny_model(name)
    helper = tiny(name, sliding_window=400) if assistant == "alike" else tiny_model("llama")
    helper.set_attn_implementation("eager")
    for prompt in (1, 6, 20):
        compare(model, **ragged_ids([prompt]), assistant_model=helper, max_new_tokens=24)


@pytest.mark.parametrize("name", TINY)
def test_prompt_lookup(tiny_model: Build, name: str) -> None:
    ids = ragged_ids([9])["input_ids"].repeat(1, 3)
    compare(tiny_model(name), input_ids=ids, prompt_lookup_num_tokens=3, max_new_tokens=24)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_several_forwards_then_crop(tiny_model: Build, name: str) -> None:
    """While the past is recorded, several steps can be taken back at once."""
    model = tiny_model(name)
    model.set_attn_implementation("hf_paged")
    ids = ragged_ids([40])["input_ids"]
    cache, straight = (PagedCache(config=model.config, block_size=4) for _ in range(2))
    with torch.no_grad():
        model(input_ids=ids[:, :20], past_key_values=cache)
        cache.activate_past_recording()
        for start, stop in ((20, 25), (25, 26), (26, 33)):
            model(input_ids=ids[:, start:stop], past_key_values=cache)
        cache.crop(-12)
        assert cache.get_seq_length() == 21
        found = model(input_ids=ids[:, 33:], past_key_values=cache).logits
        model(input_ids=ids[:, :21], past_key_values=straight)
        expected = model(input_ids=ids[:, 33:], past_key_values=straight).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    cache.pool.check()


def test_crop_past_a_window_is_refused(tiny_model: Build) -> None:
    model = tiny_model("mistral")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    with torch.no_grad():
        model(input_ids=ragged_ids([40])["input_ids"], past_key_values=cache)
    table, used = cache.block_tables, cache.pool.num_used
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-12)
    assert (cache.block_tables, cache.pool.num_used) == (table, used)
    assert cache.get_seq_length() == 40


def test_crop_into_a_block_that_a_long_step_has_passed(tiny_model: Build) -> None:
    """The partly filled block from before the step is still held, and so are its new tokens."""
    model = tiny_model("mistral")
    model.set_attn_implementation("hf_paged")
    ids = ragged_ids([125])["input_ids"]
    cache, straight = (PagedCache(config=model.config, block_size=16) for _ in range(2))
    with torch.no_grad():
        model(input_ids=ids[:, :20], past_key_values=cache)
        model(input_ids=ids[:, 20:120], past_key_values=cache)
        cache.crop(-95)
        found = model(input_ids=ids[:, 120:], past_key_values=cache).logits
        model(input_ids=ids[:, :25], past_key_values=straight)
        expected = model(input_ids=ids[:, 120:], past_key_values=straight).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_groups_by_window(tiny_model: Build) -> None:
    windows = {
        name: [group.window for group in PagedCache(config=tiny_model(name).config).pool.groups]
        for name in TINY
    }
    assert windows["llama"] == [None]
    assert windows["mistral"] == [8]
    assert windows["gemma3_text"] == windows["llama4_text"] == [None, 8]


def test_fork_and_reorder_of_mixed_groups(tiny_model: Build) -> None:
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    ids = ragged_ids([20, 20])["input_ids"]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        fork = cache.fork(2)
        before = [layer.keys for layer in fork.layers]
        fork.reorder_cache(torch.tensor([3, 0, 0, 2]))
        for layer, keys in zip(fork.layers, before, strict=True):
            assert torch.equal(layer.keys, keys[[3, 0, 0, 2]])
        own = [layer.keys for layer in cache.layers]
        model(input_ids=ids[:, :1].repeat(2, 1), past_key_values=fork)
    for layer, keys in zip(cache.layers, own, strict=True):
        assert torch.equal(layer.keys, keys)
    cache.pool.check()
