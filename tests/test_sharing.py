"""Prompts stored once, in an unmodified generate and by `prefill`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TINY, ragged_ids
from test_windows import generate
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    PreTrainedModel,
)

from hf_paged import BlockPool, PagedCache, PoolExhausted

Build = Callable[[str], PreTrainedModel]
CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=1, hidden_size=4)


def prefilled(
    prompts: torch.Tensor, changed: dict[int, int] | None = None, **kwargs: Any
) -> PagedCache:
    """A cache of `prompts` [rows, tokens]; `changed`: row -> the layer from which it differs."""
    cache = PagedCache(**{"config": CONFIG, "block_size": 4, **kwargs})
    keys = prompts[:, None, :, None].float().expand(-1, 1, -1, 4)
    for layer in range(3):
        values = -keys - layer
        for row, first in (changed or {}).items():
            if layer >= first:
                values = values.clone()
                values[row, :, 2] += 0.5
        cache.update(keys, values, layer)
    return cache


def test_identical_prompts_are_stored_once() -> None:
    prompts = torch.arange(10).repeat(4, 1)
    cache = prefilled(prompts)
    assert cache.pool.num_used == 3
    assert cache.block_tables == [cache.block_tables[0]] * 4
    assert prefilled(prompts, share_prompts=False).pool.num_used == 12
    for layer, other in zip(cache, prefilled(prompts, share_prompts=False), strict=True):
        assert torch.equal(layer[0], other[0])
        assert torch.equal(layer[1], other[1])
    prefilled(prompts).pool.check()


def test_a_common_beginning_shares_its_full_blocks() -> None:
    prompts = torch.arange(10).repeat(3, 1)
    prompts[1, 9], prompts[2, 5] = 77, 77  # 9 and 5 tokens in common: two blocks and one
    cache = prefilled(prompts)
    first, second, third = cache.block_tables
    assert second[:2] == first[:2]
    assert third[:1] == first[:1]
    assert len({*first, *second, *third}) == 3 + 1 + 2
    assert torch.equal(cache.layers[2].keys[:, 0, :, 0], prompts.float())
    cache.pool.check()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_rows_that_differ_in_a_deeper_layer_part_there(layer: int) -> None:
    """As with cross-attention to different inputs: what is shared so far is copied."""
    prompts = torch.arange(10).repeat(3, 1)
    cache = prefilled(prompts, {1: layer})
    plain = prefilled(prompts, {1: layer}, share_prompts=False)
    for mine, other in zip(cache, plain, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])
    assert cache.block_tables[0] == cache.block_tables[2]
    assert not set(cache.block_tables[0]) & set(cache.block_tables[1])
    assert cache.pool.num_used == 6
    cache.pool.check()


def test_parting_in_a_full_pool_is_rolled_back() -> None:
    pool = BlockPool(CONFIG, block_size=4, num_blocks=4)
    prompts = torch.arange(10).repeat(3, 1)
    cache = PagedCache(pool=pool)
    keys = prompts[:, None, :, None].float().expand(-1, 1, -1, 4)
    cache.update(keys, keys, 0)
    other = keys.clone()
    other[1] += 1
    with pytest.raises(PoolExhausted):
        cache.update(other, other, 1)
    assert cache.get_seq_length() == 0
    for layer in range(3):
        cache.update(keys, keys, layer)
    assert (cache.get_seq_length(), pool.num_used) == (10, 3)
    pool.check()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_generate_shares_the_prompt(tiny_model: Build, name: str, num_beams: int) -> None:
    model = tiny_model(name)
    kwargs = {
        **ragged_ids([25, 14]),
        "num_beams": num_beams,
        "num_return_sequences": 4,
        "do_sample": num_beams == 1,
        "max_new_tokens": 9,
    }
    expected = generate(model, "eager", DynamicCache(config=model.config), **kwargs)
    used = []
    for share in (True, False):
        cache = PagedCache(config=model.config, block_size=4, share_prompts=share)
        found = generate(model, "hf_paged", cache, **kwargs)
        assert torch.equal(found.sequences, expected.sequences)
        cache.pool.check()
        used.append(cache.pool.stats()["peak_used"])
    # A window of two blocks leaves nothing to share once the rows go their own ways.
    assert used[0] <= used[1] if name == "mistral" else used[0] < used[1]
    if name == "llama":
        assert used[0] < 0.7 * used[1]


@pytest.mark.parametrize("chunk_size", [None, 1, 7])
@pytest.mark.parametrize("name", TINY)
def test_prefill_then_beams(tiny_model: Build, name: str, chunk_size: int | None) -> None:
    """The prompt goes through the model once, and one token a row after that."""
    model = tiny_model(name)
    inputs = ragged_ids([25])
    kwargs = {"num_beams": 4, "max_new_tokens": 8}
    expected = generate(model, "eager", DynamicCache(config=model.config), **inputs, **kwargs)
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(out.shape[0] * out.shape[1])
    )
    try:
        assert cache.prefill(model, **inputs, chunk_size=chunk_size) is cache
        found = generate(model, "hf_paged", cache, **inputs, **kwargs)
    finally:
        hook.remove()
    assert torch.equal(found.sequences, expected.sequences)
    assert sum(seen) == 24 + 4 * 8
    cache.pool.check()


@pytest.mark.filterwarnings("error::FutureWarning")
def test_prefill_names_the_cache_as_this_transformers_does(tiny_model: Build) -> None:
    """The old name goes in 5.40; a cache under an unknown name would stay empty."""
    model, ids = tiny_model("llama"), torch.arange(1, 10)[None]
    assert PagedCache(config=model.config).prefill(model, ids).get_seq_length() == 8


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_prefill_takes_the_ids_of_its_tokens_in_chunks(chunk_size: int | None) -> None:
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    ids, kinds = torch.randint(99, (2, 2, 11))
    cache = PagedCache(config=config).prefill(model, ids, None, chunk_size, token_type_ids=kinds)
    with torch.no_grad():
        expected = model(ids, token_type_ids=kinds).logits[:, -1:]
        last = {"input_ids": ids[:, -1:], "token_type_ids": kinds[:, -1:]}
        found = model(**last, past_key_values=cache).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_prefill_of_less_than_the_cache_holds(tiny_model: Build) -> None:
    model, ids = tiny_model("llama"), torch.arange(1, 10)[None]
    cache = PagedCache(config=model.config).prefill(model, ids)
    with pytest.raises(ValueError, match="has 4 tokens, the cache holds 8; pass whole prompts"):
        cache.prefill(model, ids[:, :4])
    assert cache.prefill(model, ids).get_seq_length() == 8


def test_prefill_of_a_ragged_batch(tiny_model: Build) -> None:
    model = tiny_model("llama")
    inputs = ragged_ids([25, 3, 12])
    expected = generate(
        model, "eager", DynamicCache(config=model.config), **inputs, max_new_tokens=6
    )
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4).prefill(model, **inputs, chunk_size=5)
    assert cache.row_lengths == [24, 2, 11]
    found = generate(model, "hf_paged", cache, **inputs, max_new_tokens=6)
    assert torch.equal(found.sequences, expected.sequences)
    with pytest.raises(ValueError, match="chunk_size"):
        cache.prefill(model, **inputs, chunk_size=0)


def test_beams_cross(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The searches above do reorder: beams of one prompt do not each stay in their place."""
    orders: list[list[int]] = []
    original = PagedCache.reorder_cache

    def note(self: PagedCache, beam_idx: torch.Tensor) -> None:
        orders.append(beam_idx.tolist())
        original(self, beam_idx)

    monkeypatch.setattr(PagedCache, "reorder_cache", note)
    model = tiny_model("llama")
    cache = PagedCache(config=model.config, block_size=4)
    generate(model, "hf_paged", cache, **ragged_ids([25, 14]), num_beams=4, max_new_tokens=12)
    assert any(order != list(range(8)) for order in orders)


def test_four_continuations_of_one_prefix_equal_four_solo_runs(tiny_model: Build) -> None:
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    prefix = ragged_ids([30])["input_ids"]
    suffixes = [ragged_ids([n], seed=n)["input_ids"] for n in (1, 4, 9, 2)]
    cache = PagedCache(config=model.config, block_size=4)
    cache.prefill(model, torch.cat([prefix, prefix[:, :1]], dim=1))
    for suffix in suffixes:
        ids = torch.cat([prefix, suffix], dim=1)
        branch = cache.fork()
        found = model.generate(ids, past_key_values=branch, max_new_tokens=5)
        solo = model.generate(
            ids, past_key_values=PagedCache(config=model.config), max_new_tokens=5
        )
        assert torch.equal(found, solo)
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text"])
@pytest.mark.parametrize("lengths", [[60, 40], [9, 8, 5], [40, 60, 33]], ids=str)
def test_a_common_beginning_that_only_some_windows_reach(
    tiny_model: Build, name: str, lengths: list[int]
) -> None:
    """Rows of different lengths keep different blocks of a window, so not all can be shared."""
    model = tiny_model(name)
    inputs = ragged_ids(lengths)
    common = ragged_ids([33])["input_ids"][0]
    for row, length in enumerate(lengths):
        tokens = min(length, 33)
        start = max(lengths) - length
        inputs["input_ids"][row, start : start + tokens] = common[:tokens]
    kwargs = {**inputs, "max_new_tokens": 6}
    expected = generate(model, "eager", DynamicCache(config=model.config), **kwargs)
    for block_size in (1, 4, 16):
        cache = PagedCache(config=model.config, block_size=block_size, num_blocks=300)
        poison(cache)
        found = generate(model, "hf_paged", cache, **kwargs)
        assert torch.equal(found.sequences, expected.sequences)
        for mine, theirs in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def poison(cache: PagedCache) -> None:
    """Fill every slot with NaN, so that one that is read without having been written shows."""
    nan = torch.full((1, 2, 1, 16), torch.nan)
    for layer in range(4):
        storage = cache.pool.storage.of_layer(layer, nan, nan)
        storage.keys.fill_(torch.nan)
        storage.values.fill_(torch.nan)
