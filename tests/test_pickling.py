"""What a user may hold can be pickled and copied: to other processes, and into files."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures.models import OVERRIDES
from architectures.zoo import build, tiny_config
from conftest import ragged_ids, tiny
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged import (
    BlockPool,
    FreeFinishedRows,
    PagedCache,
    PoolExhausted,
    encoder_decoder_cache,
)
from hf_paged.mask import paged_mask

Build = Callable[[str], PreTrainedModel]


def pickled(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


def saved(one: Any) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": pickled, "torch.save": saved}


def prefilled(model: PreTrainedModel, cache: Any) -> Any:
    with torch.no_grad():
        model(**ragged_ids([13, 6]), past_key_values=cache)
    return cache


def next_logits(model: PreTrainedModel, cache: Any, steps: int = 2) -> torch.Tensor:
    inputs = ragged_ids([13, 6])
    mask, logits = inputs["attention_mask"], []
    with torch.no_grad():
        for step in range(steps):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            ids = inputs["input_ids"][:, -1 - step : inputs["input_ids"].shape[1] - step]
            out = model(ids, attention_mask=mask, past_key_values=cache)
            logits.append(out.logits)
    return torch.stack(logits)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
def test_a_cache_goes_on_where_it_was_pickled(tiny_model: Build, name: str, way: str) -> None:
    """`pickle.dumps(cache)`: "cannot pickle '_thread.RLock' object"."""
    model = tiny_model(name)
    model.set_attn_implementation("hf_paged")
    cache = prefilled(model, PagedCache(config=model.config, block_size=4))
    copied = WAYS[way](cache)
    assert type(copied) is PagedCache
    assert (copied.pool is not cache.pool, copied.pool.block_size) == (True, 4)
    assert copied.row_lengths == cache.row_lengths
    for layer, other in zip(copied.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)
    assert torch.equal(next_logits(model, copied), next_logits(model, cache))
    copied.pool.check()


@pytest.mark.parametrize("name", ["jamba", "falcon_h1", "deepseek_v32", "inkling_text", "dory"])
def test_other_states_go_with_k_v(name: str) -> None:
    """Recurrent and convolution states, indexers' keys, and layers that a model has added."""
    config = tiny_config(name, OVERRIDES.get(name, {}))
    model = build(AutoModelForCausalLM.from_config, config, "hf_paged")
    cache = prefilled(model, PagedCache(config=model.config, block_size=4))
    copied = pickled(cache)
    assert len(copied.layers) == len(cache.layers)
    assert torch.equal(next_logits(model, copied), next_logits(model, cache))


def test_rows_share_after_pickling_what_they_shared_before(tiny_model: Build) -> None:
    """Eight rows of one prompt must not come out as eight copies of it."""
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, block_size=4)
    cache.prefill(model, **ragged_ids([13])).batch_repeat_interleave(8)
    size = len(pickle.dumps(cache))
    assert pickled(cache).pool.num_used == cache.pool.num_used == 3
    assert size - len(pickle.dumps(PagedCache(config=model.config))) < 2 * cache.report().bytes


def test_neither_pool_nor_model_goes_along(tiny_model: Build) -> None:
    """A cache of a pool that knows its model, and other prompts, carries its own rows only."""
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model, num_blocks=1000)
    others = [prefilled(model, PagedCache(pool=pool)) for _ in range(3)]
    pool.insert_prefix(others[0], ragged_ids([13, 6])["input_ids"])
    cache = prefilled(model, PagedCache(pool=pool, backend="dense", share_prompts=False))
    data = pickle.dumps(cache)
    assert len(data) < 3 * cache.report().bytes + 20_000
    copied = pickle.loads(data)
    assert copied.pool.num_used == 2
    assert copied.report().backend == "dense"
    assert torch.equal(next_logits(model, copied), next_logits(model, cache))


@pytest.mark.parametrize("kv_dtype", [None, torch.float16, torch.float8_e4m3fn])
def test_what_a_pickled_cache_remembers(tiny_model: Build, kv_dtype: torch.dtype | None) -> None:
    """How K/V are stored, freed rows, recording, and which tokens may be indexed."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model.config, block_size=4, kv_dtype=kv_dtype)
    cache = prefilled(model, PagedCache(pool=pool))
    cache.free_rows(torch.tensor([1]))
    with cache.edit(1) as (keys, _):
        keys[0, :, 9] += 1
    cache.activate_past_recording()
    copied = pickled(cache)
    assert copied.pool.storage.kv_dtype == kv_dtype
    assert copied.row_lengths == [13, 0]
    assert copied.is_recording_past(0)
    ids = ragged_ids([13, 6])["input_ids"]
    assert copied.pool.insert_prefix(copied, ids) == pool.insert_prefix(cache, ids) == 8
    with pytest.raises(RuntimeError, match="Rows of this cache have been freed"):
        model(ids[:, :2], past_key_values=copied)
    copied.reset()
    prefilled(model, copied)


def test_caches_of_no_tokens_are_new(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    for empty in (PagedCache(config=model.config), PagedCache(config=model.config)):
        copied = pickled(empty)
        assert (copied.get_seq_length(), copied.batch_size) == (0, -1)
        assert not copied.is_initialized
        prefilled(model, copied)


def test_caches_that_hold_nothing_here_say_so(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    cache = prefilled(model, PagedCache(config=model.config))
    cache.offload()
    with pytest.raises(RuntimeError, match=r"restore\(\) it first"):
        pickle.dumps(cache)
    cache.free()
    with pytest.raises(RuntimeError, match="was freed"):
        pickle.dumps(cache)


def test_a_shallow_copy_is_another_name_of_the_same_rows(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    cache = prefilled(model, PagedCache(config=model.config))
    alias = copy.copy(cache)
    assert alias.pool is cache.pool
    alias.crop(-1)
    assert cache.get_seq_length() == 12


class Named(PagedCache):
    """A user's own, with an attribute."""

    name = "none"


def test_a_subclass_and_its_attributes(tiny_model: Build) -> None:
    cache = Named(config=tiny_model("llama").config)
    cache.name = "mine"
    for copied in (pickled(cache), cache.fork(), copy.copy(cache)):
        assert (type(copied), copied.name) == (Named, "mine")


@pytest.mark.parametrize("copies", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_pool_is_neither_pickled_nor_copied(tiny_model: Build, copies: Any) -> None:
    """It would be all K/V of all its caches, and the model."""
    pool = BlockPool(tiny_model("llama").config)
    with pytest.raises(TypeError, match=r"neither pickled nor copied: .* save_prefixes\(path\)"):
        copies(pool)
    with pytest.raises(TypeError, match="neither pickled nor copied"):
        copies([pool]) if copies is not copy.copy else copies(pool)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("copies", [pickled, copy.deepcopy])
def test_layers_become_transformers_own(tiny_model: Build, name: str, copies: Any) -> None:
    """A copied window knew only of as many tokens as it showed."""
    model = tiny_model(name)
    model.set_attn_implementation("hf_paged")
    dynamic = prefilled(model, DynamicCache(config=model.config))
    cache = prefilled(model, PagedCache(config=model.config))
    for own, layer in zip(dynamic.layers, cache.layers, strict=True):
        copied = copies(layer)
        assert type(copied) is type(own) in (DynamicLayer, DynamicSlidingWindowLayer)
        assert copied.get_seq_length() == own.get_seq_length() == 13
        assert copied.get_mask_sizes(3) == own.get_mask_sizes(3)
        assert torch.equal(copied.keys, layer.keys)
        assert torch.equal(copied.values, layer.values)
        fresh = copies(PagedCache(config=model.config).layers[0])
        assert (fresh.is_initialized, fresh.get_seq_length()) == (False, 0)


@pytest.mark.parametrize("name", ["falcon_h1", "deepseek_v32", "inkling_text"])
@pytest.mark.parametrize("copies", [pickled, copy.deepcopy])
def test_copied_layers_keep_their_other_states(name: str, copies: Any) -> None:
    """A copy of a hybrid or indexed layer had its K/V, and nothing else."""
    config = tiny_config(name, OVERRIDES.get(name, {}))
    model = build(AutoModelForCausalLM.from_config, config, "hf_paged")
    dynamic = prefilled(model, DynamicCache(config=model.config))
    cache = prefilled(model, PagedCache(config=model.config))
    plain = DynamicCache(config=model.config)
    plain.layers = [copies(layer) for layer in cache.layers]
    assert [type(layer) for layer in plain.layers] == [type(layer) for layer in dynamic.layers]
    expected = next_logits(model, dynamic)
    torch.testing.assert_close(next_logits(model, plain), expected, atol=3e-4, rtol=0)


def test_views_masks_and_sizes_are_pickled_as_what_they_show(tiny_model: Build) -> None:
    """Hooks that keep what they get, and send it elsewhere, got errors about locks."""
    model = tiny_model("llama")
    cache = prefilled(model, PagedCache(config=model.config))
    length, offset = cache.get_mask_sizes(1, 0)
    shown = torch.nn.functional.pad(ragged_ids([13, 6])["attention_mask"], (0, 1), value=1)
    mask = paged_mask(2, 1, length, 13, offset, attention_mask=shown.bool())
    states = torch.randn(2, 2, 1, 16)
    view, _ = cache.update(states, states, 0)
    for copies in (pickled, copy.deepcopy):
        assert type(copies(length)) is int
        assert copies(length) == 14
        for one in (mask, view, cache.layers[0].values):
            copied = copies(one)
            assert type(copied) is torch.Tensor
            assert torch.equal(copied, one + 0 if one.dtype != torch.bool else one | False)


def test_an_error_keeps_its_numbers() -> None:
    """An exception that a worker raises comes back through pickle: this one broke the pool of
    workers."""
    error = PoolExhausted(5, 1, 2, 8, "4 layers with full attention")
    error.add = "a note"
    for copied in (pickled(error), copy.deepcopy(error), copy.copy(error)):
        assert type(copied) is PoolExhausted
        assert str(copied) == str(error)
        assert (copied.needed, copied.free, copied.evictable, copied.total) == (5, 1, 2, 8)
        assert copied.add == "a note"


def test_what_goes_with_a_generate(tiny_model: Build) -> None:
    """`torch.save` of generate's output, a stopping criterion, reports and batches."""
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    inputs = ragged_ids([13, 6])
    cache = PagedCache(config=model.config, block_size=4)
    stop = FreeFinishedRows(cache, 98)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        stopping_criteria=StoppingCriteriaList([stop]),
    )
    copied = saved(out)
    assert torch.equal(copied.sequences, out.sequences)
    copied_cache = copied.past_key_values
    assert type(copied_cache) is PagedCache
    assert copied_cache.row_lengths == cache.row_lengths
    again = {"input_ids": out.sequences, "max_new_tokens": 4, "do_sample": False}
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
    found, expected = (
        model.generate(**again, attention_mask=mask, past_key_values=each)
        for each in (copied_cache, cache)
    )
    assert torch.equal(found, expected)
    assert pickled(stop)._cache.row_lengths == cache.row_lengths
    assert pickled(cache.report()) == cache.report()
    (batch,) = BlockPool(model.config).batches([[1, 2, 3], [4]], 2)
    assert pickled(batch).indices == batch.indices
    assert torch.equal(pickled(batch).inputs["input_ids"], batch.inputs["input_ids"])


def test_an_encoder_decoder_cache() -> None:
    from architectures.test_encoder_decoder import tiny as tiny_encoder_decoder

    model = tiny_encoder_decoder("bart", "hf_paged")
    inputs = {"input_ids": torch.randint(3, 90, (2, 7)), "max_new_tokens": 5, "do_sample": False}
    out = model.generate(
        **inputs,
        past_key_values=encoder_decoder_cache(model.config),
        return_dict_in_generate=True,
    )
    cache = out.past_key_values
    copied = pickled(cache)
    assert copied.is_updated == cache.is_updated
    for layer, other in zip(
        copied.self_attention_cache.layers, cache.self_attention_cache.layers, strict=True
    ):
        assert torch.equal(layer.keys, other.keys)
    assert copied.get_seq_length() == cache.get_seq_length() == 5


# Another process


def go_on(pipe: Any) -> None:
    """In a process of its own: computes two steps on the cache that it is sent; sends all back."""
    torch.set_num_threads(1)
    model = tiny("gemma3_text")
    model.set_attn_implementation("hf_paged")
    cache = pipe.recv()
    logits = next_logits(model, cache)
    try:
        with torch.no_grad():
            model(torch.ones(2, 500, dtype=torch.long), past_key_values=full_cache(model))
    except PoolExhausted as error:
        pipe.send((logits.numpy(), cache, error))
    pipe.recv()  # tensors are in shared memory, which lives for as long as who has sent them


def full_cache(model: PreTrainedModel) -> PagedCache:
    return PagedCache(config=model.config, num_blocks=3)


def test_a_cache_goes_to_another_process_and_comes_back(tiny_model: Build) -> None:
    """Through `multiprocessing`, as a data loader or RPC sends it; and an error comes back."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    cache = prefilled(model, PagedCache(config=model.config, block_size=4))
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=go_on, args=(there,))
    process.start()
    there.close()
    try:
        here.send(cache)
        logits, returned, error = here.recv()
        here.send("thanks")
    finally:
        process.join(60)
        process.kill()
    expected = next_logits(model, cache)
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=1e-5, rtol=1e-5)
    assert returned.row_lengths == cache.row_lengths
    for layer, other in zip(returned.layers, cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
    assert (error.total, type(error)) == (3, PoolExhausted)
