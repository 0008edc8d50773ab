"""Prompts that are reused across calls: what is matched, and that nothing else ever is."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import check_used, ragged_ids, tiny, two_layer_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from peft import LoraConfig, get_peft_model
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    BartConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen3NextConfig,
    StoppingCriteriaList,
)

from hf_paged import BlockPool, FreeFinishedRows, PagedCache, PoolExhausted
from hf_paged.prefix.radix import PrefixIndex

ARCHITECTURES = ["llama", "gemma3_text", "mistral", "llama4_text"]
KEY = ("model", "extra")


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Any:
    model = tiny(request.param)
    model.set_attn_implementation("hf_paged")
    return model


def llama() -> Any:
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return ragged_ids([length], seed=seed)["input_ids"]


def padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(p.shape[1] for p in prompts)
    pads = [width - p.shape[1] for p in prompts]
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.cat([pad(p, (n, 0)) for p, n in zip(prompts, pads, strict=True)]),
        "attention_mask": torch.cat(
            [pad(torch.ones_like(p), (n, 0)) for p, n in zip(prompts, pads, strict=True)]
        ),
    }


def alone(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    return model.generate(**inputs, past_key_values=cache, **{"max_new_tokens": 6, **kwargs})


def learn(pool: BlockPool, model: Any, ids: torch.Tensor, **key: Any) -> None:
    """Index a prompt, all of it."""
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        pool.insert_prefix(cache, ids, **key)


def reuse(pool: BlockPool, model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> list[int]:
    """Generate behind what is known, check it, and say how much of each row was."""
    with pool.match_prefix(**inputs) as cache:
        known = cache.row_lengths
        kwargs = {"max_new_tokens": 6, **kwargs}
        found = model.generate(**inputs, past_key_values=cache, **kwargs)
        assert torch.equal(found, alone(model, inputs, **kwargs))
        pool.insert_prefix(cache, found)
        pool.check()
    return known


# The first tokens of a prompt that are known, of a block of 4, and how many are reused.
@pytest.mark.parametrize(
    ("known", "reused"), [(20, 19), (19, 19), (16, 16), (14, 14), (13, 13), (1, 1), (0, 0)]
)
def test_a_known_beginning_is_reused(model: Any, known: int, reused: int) -> None:
    ids, other = prompt(20), prompt(20, seed=1)
    pool = BlockPool(model, block_size=4)
    other[:, :known] = ids[:, :known]
    if known < 20:
        other[:, known] = (ids[:, known] + 1) % model.config.vocab_size
    # What is known ends where the prompts part, so that every window is there.
    if known:
        learn(pool, model, other[:, :known])
    learn(pool, model, other)
    lengths = reuse(pool, model, {"input_ids": ids})
    assert lengths == ([reused] if reused else [])
    stats = pool.stats()
    assert (stats["hits"], stats["matched_tokens"]) == (int(reused > 0), reused)


def test_only_what_is_new_is_forwarded(model: Any) -> None:
    pool, ids = BlockPool(model, block_size=4), prompt(20)
    learn(pool, model, ids[:, :17])
    forwarded = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: forwarded.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    with pool.match_prefix(ids) as cache:
        model.generate(ids, past_key_values=cache, max_new_tokens=3)
    assert forwarded == [3, 1, 1]


def test_a_batch_continues_where_all_its_rows_are_known(model: Any) -> None:
    pool = BlockPool(model, block_size=4)
    inputs = padded([prompt(20), prompt(9, seed=1)])
    # Rows: 20 tokens; 11 columns of padding and 9 tokens. Known: 18 and 4 of them.
    learn(pool, model, prompt(20)[:, :15])
    learn(pool, model, prompt(20)[:, :18])
    learn(pool, model, prompt(9, seed=1)[:, :4])
    assert reuse(pool, model, inputs) == [15, 4]
    assert reuse(pool, model, inputs) in ([19, 8], [0, 0], [])  # windows may have moved on


def test_a_row_without_a_known_beginning_holds_the_others_back() -> None:
    model = llama()
    pool = BlockPool(model, block_size=4)
    learn(pool, model, prompt(20))
    assert reuse(pool, model, padded([prompt(20), prompt(9, seed=1)])) == [11, 0]
    assert reuse(pool, model, padded([prompt(20), prompt(20, seed=2)])) == []


@pytest.mark.parametrize("how", ["beams", "samples", "repeated"])
def test_sequences_share_a_known_prompt(model: Any, how: str) -> None:
    pool, inputs = BlockPool(model, block_size=4), {"input_ids": prompt(20)}
    learn(pool, model, prompt(20))
    if how == "beams":
        reuse(pool, model, inputs, num_beams=3, num_return_sequences=2)
        return
    cache = pool.match_prefix(**inputs, num_return_sequences=3 if how == "repeated" else 1)
    assert cache.row_lengths == [19] * (3 if how == "repeated" else 1)
    torch.manual_seed(0)
    found = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=6, do_sample=True, num_return_sequences=3
    )
    torch.manual_seed(0)
    assert torch.equal(found, alone(model, inputs, do_sample=True, num_return_sequences=3))


def test_beam_search_indexes_its_prompts_only(model: Any) -> None:
    pool, inputs = BlockPool(model, block_size=4), padded([prompt(12), prompt(9, seed=1)])
    with pool.match_prefix(**inputs) as cache:
        found = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=7, num_beams=3, num_return_sequences=2
        )
        # Whole blocks: what is behind the prompt in its last block is some other beam's.
        assert pool.insert_prefix(cache, found) == 12 + 8
    pool.check()


def test_beam_search_for_one_token_indexes_its_prompts(model: Any) -> None:
    """Then the rows have moved, and still hold nothing but the prompts."""
    pool, inputs = BlockPool(model, block_size=4), padded([prompt(12), prompt(9, seed=1)])
    with pool.match_prefix(**inputs) as cache:
        found = model.generate(**inputs, past_key_values=cache, max_new_tokens=1, num_beams=3)
        assert (len(found), cache.batch_size) == (2, 6)
        assert pool.insert_prefix(cache, found) == 12 + 9
    pool.check()


@pytest.mark.parametrize("how", ["crop", "failed step", "select", "free"])
def test_padding_behind_a_token_that_is_gone_is_forgotten(how: str) -> None:
    model, ids = llama(), prompt(9)
    pool = BlockPool(model, block_size=4)
    cache = PagedCache(pool=pool)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 10] = 0

    def forward() -> None:
        with torch.no_grad():
            model(prompt(3).repeat(2, 1), attention_mask=mask, past_key_values=cache)

    with torch.no_grad():
        model(ids.repeat(2, 1), past_key_values=cache)
    if how == "failed step":
        hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward()
        hook.remove()
    else:
        forward()
    sequences = torch.cat([ids, prompt(3)], 1).repeat(2, 1)
    if how == "crop":
        cache.crop(-3)
    elif how == "select":
        cache.batch_select_indices(torch.tensor([0]))
        sequences = sequences[:1]
    elif how == "free":
        cache.free_rows(torch.tensor([1]))
    assert pool.insert_prefix(cache, sequences) == (12 if how in ("select", "free") else 9)


def test_indexing_moved_rows_leaves_them_as_they_are() -> None:
    model, ids = llama(), prompt(9)
    pool = BlockPool(model, block_size=4)
    learn(pool, model, ids)
    cache, new = PagedCache(pool=pool), torch.tensor([[5, 6], [7, 8]])
    with torch.no_grad():
        model(ids.repeat(2, 1), past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        model(new, past_key_values=cache)
        before = cache.layers[0].keys
        pool.insert_prefix(cache, torch.cat([ids.repeat(2, 1), new], 1))
    assert torch.equal(cache.layers[0].keys, before)


def test_known_tokens_are_stored_once() -> None:
    model = llama()
    pool, ids = BlockPool(model, block_size=4), prompt(18)
    learn(pool, model, ids)
    used = pool.num_blocks - pool.num_free
    cache = PagedCache(pool=pool)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        assert pool.insert_prefix(cache, ids) == 0
        assert pool.num_blocks - pool.num_free == used
        # The redirected rows go on, in a copy of the block that is not full.
        logits = model(input_ids=ids[:, :1], past_key_values=cache).logits
    expected = model(input_ids=torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=3e-5)
    assert reuse(pool, model, {"input_ids": ids}) == [17]


def test_what_a_cache_goes_on_to_write_does_not_reach_the_index() -> None:
    model = llama()
    pool, ids = BlockPool(model, block_size=4), prompt(18)
    with torch.no_grad(), PagedCache(pool=pool) as cache:
        model(input_ids=ids, past_key_values=cache)
        pool.insert_prefix(cache, ids)
        model(input_ids=prompt(5, seed=1), past_key_values=cache)
        cache.crop(-6)
        model(input_ids=prompt(5, seed=2), past_key_values=cache)
    assert reuse(pool, model, {"input_ids": torch.cat([ids, prompt(3, seed=3)], 1)}) == [18]


def test_a_window_that_has_moved_on_is_no_match() -> None:
    model = tiny("mistral")
    model.set_attn_implementation("hf_paged")
    window = model.config.sliding_window
    pool, ids = BlockPool(model, block_size=4), prompt(4 * window)
    learn(pool, model, ids)
    half = {"input_ids": torch.cat([ids[:, : 2 * window], prompt(5, seed=1)], 1)}
    assert reuse(pool, model, half) == []
    learn(pool, model, ids[:, : 2 * window])
    longer = {"input_ids": torch.cat([ids[:, : 2 * window], prompt(5, seed=2)], 1)}
    assert reuse(pool, model, longer) == [2 * window]


def test_a_shorter_prompt_gives_a_longer_one_no_block() -> None:
    """A window let the first tokens' block go; a prompt that ends in it has half of that block."""
    model = tiny("mistral")
    model.set_attn_implementation("hf_paged")
    pool, ids = BlockPool(model, block_size=4), prompt(12)
    learn(pool, model, ids)
    learn(pool, model, ids[:, :2])
    assert reuse(pool, model, {"input_ids": ids[:, :6]}) == []


# What must never be taken for known


def hits(pool: BlockPool, ids: torch.Tensor, **key: Any) -> int:
    with pool.match_prefix(ids, **key) as cache:
        return sum(cache.row_lengths)


def test_a_swapped_token_ends_the_match() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model.config, block_size=4)
    learn(pool, model, ids)
    for at in range(20):
        other = ids.clone()
        other[0, at] = (ids[0, at] + 1) % model.config.vocab_size
        assert hits(pool, other) == min(at, 19)


@pytest.mark.parametrize(
    ("key", "other"),
    [("a", "b"), ("1", 1), (1, (1,)), (b"a", "a"), (("a", "b"), ("a,b",)), ("", None), (b"", "")],
)
def test_another_extra_key_never_hits(key: Any, other: Any) -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4)
    learn(pool, model, ids, extra_key=key)
    assert hits(pool, ids, extra_key=other) == 0
    assert hits(pool, ids, extra_key=key) == 19


@pytest.mark.parametrize("key", [True, 1.5, ["a"], ("a", None, {})])
def test_a_key_that_cannot_be_told_apart_is_refused(key: Any) -> None:
    pool = BlockPool(llama(), block_size=4)
    with pytest.raises(ValueError, match="extra_key must be"):
        pool.match_prefix(prompt(5), extra_key=key)


def test_changed_weights_never_hit() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4)
    learn(pool, model, ids)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1.01
    assert hits(pool, ids) == 0
    model.load_state_dict(before)
    assert hits(pool, ids) == 19


def test_another_adapter_never_hits() -> None:
    ids = prompt(20)
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config, adapter_name="one")
    model.add_adapter("two", config)
    pool = BlockPool(model, block_size=4)
    known = []
    for adapter in ("one", "two", None, "one"):
        if adapter is None:
            with model.disable_adapter():
                known.append(hits(pool, ids))
                learn(pool, model, ids)
                assert hits(pool, ids) == 19
        else:
            model.set_adapter(adapter)
            known.append(hits(pool, ids))
            learn(pool, model, ids)
    assert known == [0, 0, 0, 19]


def test_a_prompt_computed_under_an_adapter_counts_no_padding_as_positions() -> None:
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config)
    inputs = ragged_ids([5, 12])
    with torch.no_grad():
        expected = model(**inputs, past_key_values=None, position_ids=positions(inputs)).logits
        cache = PagedCache(config=model.config).prefill(model, **inputs)
        assert cache.get_seq_length() == 11
        found = model(
            input_ids=inputs["input_ids"][:, -1:],
            attention_mask=inputs["attention_mask"],
            position_ids=positions(inputs)[:, -1:],
            past_key_values=cache,
        ).logits
    torch.testing.assert_close(found[:, 0], expected[:, -1], atol=1e-4, rtol=1e-4)


def positions(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(
    "how",
    [
        *("one element", "inference", "scaling", "memory", "rows", "columns", "adapter", "buffer"),
        *("module", "module gone", "neighbours"),
    ],
)
def test_a_change_that_is_easily_missed_never_hits(how: str) -> None:
    ids = prompt(20)
    model = llama()
    if how == "scaling":
        config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    if how == "inference":
        with torch.inference_mode():
            model = copy.deepcopy(model)
    mlp = model.get_submodule("model.layers.1.mlp") if how != "scaling" else None
    if how == "buffer":
        mlp.register_buffer("shift", torch.zeros(1))
    pool = BlockPool(model, block_size=4)
    learn(pool, model, ids)
    assert hits(pool, ids) == 19
    if how == "scaling":
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(5.0)
    elif how == "memory":
        mlp.up_proj.weight.data = mlp.up_proj.weight.data * 1.01
    elif how in ("rows", "columns"):
        weight = mlp.up_proj.weight if how == "rows" else mlp.up_proj.weight.T
        with torch.no_grad():
            weight[[7, 11]] = weight[[11, 7]]
    elif how == "neighbours":  # the same modules in the same order, the last one in the next layer
        layers = model.model.layers
        last = layers[0]._modules.popitem()
        layers[1]._modules = dict([last, *layers[1]._modules.items()])
    elif how.startswith("module"):
        old = mlp.up_proj
        mlp.up_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)
        if how == "module gone":
            del old
    elif how == "adapter":
        get_peft_model(model, LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    elif how == "buffer":
        mlp.shift += 1
    else:
        with torch.inference_mode():
            model.get_input_embeddings().weight[ids[0, 3], 5] += 1
    assert hits(pool, ids) == 0


@pytest.mark.parametrize("how", ["weights", "adapter", "fork", "matched"])
def test_a_cache_of_other_weights_is_not_indexed(how: str) -> None:
    """K/V are of the model as it was when they were computed, not as it is now."""
    ids = prompt(20)
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config, adapter_name="one")
    model.add_adapter("two", config)
    pool = BlockPool(model, block_size=4)
    if how == "matched":
        learn(pool, model, ids[:, :10])
    cache = pool.match_prefix(ids)
    with torch.no_grad():
        model(input_ids=ids[:, cache.get_seq_length() :], past_key_values=cache)
        if how == "fork":
            cache = cache.fork()
        if how == "weights":
            model.get_input_embeddings().weight[0] += 1
        else:
            model.set_adapter("two")
    with pytest.raises(ValueError, match="not those that this cache was begun with"):
        pool.insert_prefix(cache, ids)
    assert hits(pool, ids) == 0


def test_weights_that_cannot_be_read_are_refused() -> None:
    model = llama()
    model.lm_head.weight = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    pool = BlockPool(model, block_size=4)
    with pytest.raises(ValueError, match=r"weights of 'lm_head' .TwoTensor.* make it from"):
        pool.match_prefix(prompt(5))


def test_a_weight_in_the_place_of_another_never_hits() -> None:
    """The new tensor may get the address of the old one, for its data and for itself."""
    model, ids = llama(), prompt(20)
    layer = model.model.layers[0].mlp.up_proj
    memory = layer.weight.detach().clone().numpy()
    pool = BlockPool(model, block_size=4)
    for _ in range(20):
        new = torch.from_numpy(memory)
        del layer.weight
        layer.weight = torch.nn.Parameter(new)
        assert hits(pool, ids) == 0
        learn(pool, model, ids)
        memory *= 1.01


def test_the_same_weights_are_the_same_wherever_they_lie() -> None:
    """As in a file that is mapped into memory: a loaded model need not have them at 8 bytes."""
    model = llama().to(torch.bfloat16)
    pool = BlockPool(model, block_size=4)
    identity = pool.identity()
    layer = model.model.layers[0].mlp.up_proj
    memory = torch.empty(layer.weight.numel() + 1, dtype=torch.bfloat16)
    with torch.no_grad():
        moved = memory[1:].view(layer.weight.shape).copy_(layer.weight)
    layer.weight = torch.nn.Parameter(moved)
    assert layer.weight.data_ptr() % 8
    assert pool.identity() == identity


def test_another_dtype_never_hits() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4)
    learn(pool, model, ids)
    assert hits(pool, ids) == 19
    model.to(torch.bfloat16)
    assert hits(pool, ids) == 0


def test_another_dtype_is_refused_where_the_pool_stores_its_own() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model.config, block_size=4, kv_dtype=torch.bfloat16)
    learn(pool, model, ids)
    model.to(torch.bfloat16)
    with pool.match_prefix(ids) as cache, pytest.raises(ValueError, match="one dtype for all"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_weights_that_are_not_loaded_are_refused() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32))
    with pytest.raises(ValueError, match=r"on meta. cannot be read"):
        BlockPool(model).match_prefix(prompt(5))


def test_what_a_mask_beyond_causal_has_computed_is_not_indexed() -> None:
    model, ids = llama(), prompt(12)
    pool = BlockPool(model, block_size=4)
    mask = torch.zeros(1, 1, 8, 12)  # the last 8 tokens see each other
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        model(ids[:, 4:], attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="did not ask the cache for its mask"):
            pool.insert_prefix(cache, ids)
    both_ways = tiny("gemma3_text", use_bidirectional_attention=True)
    both_ways.set_attn_implementation("hf_paged")
    pool = BlockPool(both_ways, block_size=4)
    with PagedCache(pool=pool) as cache, torch.no_grad():
        both_ways(ids, past_key_values=cache)
        assert pool.insert_prefix(cache, ids) == 0


def test_padding_that_was_stored_is_not_indexed() -> None:
    """sdpa does not tell the cache what is padding, so that is stored like tokens."""
    model = tiny("llama")
    model.set_attn_implementation("sdpa")
    pool, inputs = BlockPool(model, block_size=4), ragged_ids([12, 7])
    with PagedCache(pool=pool) as cache:
        found = model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
        for mask in (None, inputs["attention_mask"]):
            with pytest.raises(ValueError, match="did not ask the cache for its mask"):
                pool.insert_prefix(cache, found, attention_mask=mask)
    with PagedCache(pool=pool) as cache:
        ids = prompt(12)
        found = model.generate(ids, past_key_values=cache, max_new_tokens=3)
        assert pool.insert_prefix(cache, found, attention_mask=torch.ones_like(ids)) == 14


def test_models_whose_positions_count_padding_are_refused_padding() -> None:
    config = BartConfig(
        vocab_size=99,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    pool = BlockPool(config)
    pool.match_prefix(prompt(9))
    with pytest.raises(ValueError, match="counts padding as positions"):
        pool.match_prefix(**padded([prompt(9), prompt(5)]))


def test_encoder_decoder_models_are_refused() -> None:
    pool = BlockPool(BartConfig(decoder_layers=2))
    with pytest.raises(ValueError, match="depend on what the encoder reads"):
        pool.match_prefix(prompt(9))


def test_an_extra_key_whose_prefixes_are_evicted_leaves_nothing() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4)
    for tenant in range(5):
        learn(pool, model, ids, extra_key=tenant)
    pool.evict(100)
    assert list(pool.index.paths()) == []
    assert not pool.index._roots


def test_a_hash_collision_does_not_matter() -> None:
    assert hash((-1, 5)) == hash((-2, 5))
    pool = BlockPool(LlamaConfig(num_hidden_layers=1), block_size=2, num_blocks=4)
    index, blocks = PrefixIndex(pool.groups, 2), pool.allocator.allocate([1])
    index.insert(KEY, [-1, 5], blocks)
    assert index.match(KEY, [-2, 5])[0] == 0
    assert index.match(KEY, [-1, 5])[0] == 2


# Eviction


def test_prefixes_are_evicted_before_the_pool_is_full() -> None:
    model = llama()
    pool = BlockPool(model, block_size=4, num_blocks=12)
    first, second = prompt(20), prompt(20, seed=1)
    learn(pool, model, first)
    learn(pool, model, second)
    assert (pool.num_free, pool.num_used, pool.num_evictable) == (2, 0, 10)
    assert hits(pool, first) == 19  # so `second` was used less recently
    assert reuse(pool, model, {"input_ids": prompt(20, seed=2)}) == []
    assert pool.stats()["evictions"] >= 3
    assert hits(pool, first) == 19
    assert hits(pool, second) < 19
    pool.check()


def test_a_node_in_use_is_never_evicted() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4, num_blocks=8)
    learn(pool, model, ids)
    with pool.match_prefix(ids) as cache:
        assert pool.num_evictable == 0
        assert pool.evict(8) == 0
        with pytest.raises(PoolExhausted) as error, torch.no_grad():
            model(input_ids=prompt(16, seed=1), past_key_values=PagedCache(pool=pool))
        assert (error.value.free, error.value.evictable) == (3, 0)
        assert torch.equal(
            model.generate(ids, past_key_values=cache, max_new_tokens=6),
            alone(model, {"input_ids": ids}),
        )
    assert pool.evict(2) == 2
    assert hits(pool, ids) == 12
    assert pool.evict(8) == 3
    assert pool.num_free == pool.num_blocks


def test_a_full_pool_names_the_group_that_eviction_does_not_help() -> None:
    pool, ids = BlockPool(CONFIG, block_size=4, num_blocks=12), prompt(16)
    with pool.match_prefix(ids) as cache:
        for layer in range(2):
            cache.update(*torch.rand(2, 1, 1, 16, 2), layer)
        pool.insert_prefix(cache, ids, attention_mask=torch.ones_like(ids))
    enough = pool.groups[0].num_free + pool.index.evictable()[0]
    assert enough > pool.groups[0].num_free
    with pytest.raises(PoolExhausted, match="window") as error:
        pool.allocator.allocate([enough, 13])
    assert error.value.needed == 13
    assert pool.stats()["evictions"] == 0
    pool.check()


def test_a_full_pool_evicts_nothing_in_vain() -> None:
    model = llama()
    pool = BlockPool(model, block_size=4, num_blocks=8)
    learn(pool, model, prompt(20))
    with pytest.raises(PoolExhausted) as error, torch.no_grad():
        model(input_ids=prompt(36, seed=1), past_key_values=PagedCache(pool=pool))
    assert (error.value.needed, error.value.free, error.value.evictable) == (9, 3, 5)
    assert hits(pool, prompt(20)) == 19


def test_what_an_eviction_leaves_is_reused(model: Any) -> None:
    pool, ids = BlockPool(model, block_size=4), prompt(20)
    for known in range(4, 21, 4):  # so that each of them ends where every window is there
        learn(pool, model, ids[:, :known])
    groups = len(pool.groups)
    assert pool.evict(2 * groups) == 2 * groups
    assert reuse(pool, model, {"input_ids": ids}) == [12]


def test_clear_prefixes_leaves_caches_alone() -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4, num_blocks=12)
    learn(pool, model, ids)
    with pool.match_prefix(ids) as cache:
        pool.clear_prefixes()
        pool.check()
        assert hits(pool, ids) == 0
        found = model.generate(ids, past_key_values=cache, max_new_tokens=6)
    assert torch.equal(found, alone(model, {"input_ids": ids}))
    assert pool.num_free == 12


# What cannot be reused exactly is refused


def test_recurrent_layers_are_refused() -> None:
    config = Qwen3NextConfig(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    pool = BlockPool(config)
    with pytest.raises(ValueError, match="other states than K/V"):
        pool.match_prefix(prompt(5))


def test_rotary_embeddings_that_depend_on_the_length_are_refused_beyond_it() -> None:
    dynamic = LlamaConfig(
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    factors = {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "rope_theta": 10000.0}
    longrope = Phi3Config(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", **factors},
    )
    for config in (dynamic, longrope):
        pool = BlockPool(config)
        pool.match_prefix(prompt(16))
        with pytest.raises(ValueError, match="more than 16 tokens cannot be reused"):
            pool.match_prefix(prompt(17))


def test_padding_on_the_right_is_refused() -> None:
    model = llama()
    pool, ids = BlockPool(model), ragged_ids([5, 5])["input_ids"]
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="padded on the left"):
        pool.match_prefix(ids, mask)
    cache = PagedCache(pool=pool)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        model(
            input_ids=ids[:, :1],
            attention_mask=torch.cat([mask, mask[:, :1]], 1),
            past_key_values=cache,
        )
    with pytest.raises(ValueError, match="pad on the left"):
        pool.insert_prefix(cache, torch.cat([ids, ids[:, :1]], 1))


def test_sequences_that_are_not_the_caches_are_refused() -> None:
    model, ids = llama(), ragged_ids([6, 4])
    pool = BlockPool(model)
    cache = PagedCache(pool=pool)
    with torch.no_grad():
        model(**ids, past_key_values=cache, position_ids=positions(ids))
    sequences = ids["input_ids"]
    for wrong, message in [
        (sequences[:, :5], "have 5 tokens a row"),
        (sequences[:1], "1 sequences for a cache of 2 rows"),
        (sequences.float(), "whole numbers"),
        (sequences[0], "whole numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            pool.insert_prefix(cache, wrong)
    with pytest.raises(ValueError, match="not the one that the cache was computed with"):
        pool.insert_prefix(cache, sequences, attention_mask=torch.ones_like(sequences))
    with pytest.raises(ValueError, match="another pool"):
        BlockPool(model).insert_prefix(cache, sequences)
    assert pool.insert_prefix(cache, sequences, attention_mask=ids["attention_mask"]) == 10


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.uint8])
def test_token_ids_of_any_kind_and_layout(kind: torch.dtype) -> None:
    model, ids = llama(), prompt(20)
    pool = BlockPool(model, block_size=4)
    learn(pool, model, ids)
    strided = torch.stack([ids, ids], 2).to(kind)[:, :, 0]
    assert not strided.is_contiguous()
    assert hits(pool, strided) == 19


# Threads


@pytest.mark.parametrize("num_blocks", [60, None])
def test_two_threads_on_one_pool(num_blocks: int | None) -> None:
    model = llama()
    pool = BlockPool(model, block_size=4, num_blocks=num_blocks)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(12):
                own = prompt(4, seed=100 * thread + turn)
                inputs = {"input_ids": torch.cat([prompt(20, seed=turn % 3), own], 1)}
                with pool.match_prefix(**inputs) as cache:
                    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=6)
                    pool.insert_prefix(cache, found)
                assert torch.equal(found, alone(model, inputs))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    pool.check()
    assert pool.num_used == 0
    assert pool.stats()["hits"] > 0
    assert (pool.stats()["evictions"] > 0) == (num_blocks is not None)


def test_a_pool_that_grows_under_other_threads_loses_nothing() -> None:
    pool = BlockPool(CONFIG, block_size=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            with PagedCache(pool=pool) as cache:
                for step in range(12):
                    states = torch.full((1, 1, 1, 2), float(1000 * number + 20 * turn + step))
                    for layer in range(2):
                        cache.update(states, states, layer)
                first = 1000 * number + 20 * turn
                if cache.layers[0].keys[0, 0, :, 0].tolist() != [*range(first, first + 12)]:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    pool.check()


# Admission


def test_a_long_list_of_prompts_runs_in_a_small_pool(model: Any) -> None:
    lengths = [int(n) for n in torch.randint(1, 30, (24,), generator=torch.manual_seed(0))]
    common = prompt(9, seed=50)[0].tolist()
    prompts = [prompt(n, seed=n)[0].tolist() for n in lengths]
    prompts = [common + p if index % 3 == 0 else p for index, p in enumerate(prompts)]
    pool = BlockPool(model, block_size=4, num_blocks=26)
    learn(pool, model, torch.tensor([common]))  # on its own, so that every window is there
    seen, sizes = {}, []
    given = forwarded = 0  # the columns of all prompts and answers, and those that were computed

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal forwarded
        forwarded += kwargs["input_ids"].numel()

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    for batch in pool.batches(prompts, max_new_tokens=6):
        sizes.append(len(batch))
        given += batch.inputs["input_ids"].numel() + 5 * len(batch)
        cache = pool.match_prefix(**batch.inputs)
        found = model.generate(**batch.inputs, past_key_values=cache, max_new_tokens=6)
        pool.insert_prefix(cache, found)
        seen |= {index: row[-6:].tolist() for index, row in zip(batch.indices, found, strict=True)}
        pool.check()
    hook.remove()
    assert sorted(seen) == list(range(24))
    assert max(sizes) > 1
    matched = pool.stats()["matched_tokens"]
    assert matched > 0  # what some begin with was computed once
    assert forwarded <= given - matched
    for index, ids in enumerate(prompts):
        expected = alone(model, {"input_ids": torch.tensor([ids])})
        assert seen[index] == expected[0, -6:].tolist()


def test_prompts_that_begin_alike_are_put_together() -> None:
    pool = BlockPool(llama(), block_size=4, num_blocks=100)
    prompts = [[index % 3] * 4 + [index] for index in range(9)] + [[7, 8, 9]]
    order = [batch.indices for batch in pool.batches(prompts, 4, max_prompts=3)]
    assert order == [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9]]


def test_prompts_that_can_never_fit_are_said_up_front() -> None:
    pool = BlockPool(llama(), block_size=4, num_blocks=10)
    with pytest.raises(ValueError, match=r"Prompts \[1, 3\] can never fit"):
        pool.batches([[1] * 4, [1] * 40, [2] * 4, [1] * 30], max_new_tokens=8)
    with pytest.raises(ValueError, match="Prompt 0 must be whole numbers"):
        pool.batches(["some text"], max_new_tokens=8)
    assert list(pool.batches([], max_new_tokens=8)) == []


def test_a_second_pass_says_what_is_in_its_way() -> None:
    model = llama()
    pool = BlockPool(model, block_size=4, num_blocks=10)
    prompts = [prompt(20)[0].tolist()]
    for batch in pool.batches(prompts, max_new_tokens=6):
        cache = pool.match_prefix(**batch.inputs)
        model.generate(**batch.inputs, past_key_values=cache, max_new_tokens=6)
    with pytest.raises(RuntimeError, match=r"free\(\) the caches"):
        next(pool.batches(prompts, max_new_tokens=6))
    cache.free()
    assert next(pool.batches(prompts, max_new_tokens=6)).indices == [0]


def test_a_batch_of_padding_in_front_of_which_nothing_is_known(tmp_path: Path) -> None:
    """Columns of padding alone are known, so a batch may begin with rows without a block."""
    model, pool = llama(), BlockPool(llama(), block_size=4)
    inputs = padded([prompt(9), prompt(5, seed=1)])
    inputs = {
        "input_ids": F.pad(inputs["input_ids"], (6, 0)),
        "attention_mask": F.pad(inputs["attention_mask"], (6, 0)),
    }
    cache = pool.match_prefix(**inputs)
    assert cache.get_seq_length() == 6
    assert all(keys is None for keys, _, _ in cache)  # no K/V have come yet, nor their shape
    cache.save(tmp_path / "cache")
    assert PagedCache.load(tmp_path / "cache", llama()).get_seq_length() == 6
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=4)
    assert torch.equal(found, alone(model, inputs, max_new_tokens=4))


def test_a_stopping_criterion_is_used_again(model: Any) -> None:
    inputs = padded([prompt(20), prompt(9, seed=1)])
    ends = alone(model, inputs, max_new_tokens=12)[:, 20 + 2].tolist()
    kwargs = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0}
    cache = PagedCache(config=model.config, block_size=4)
    stop = StoppingCriteriaList([FreeFinishedRows(cache, ends)])
    for batch in (inputs, inputs, padded([prompt(12), prompt(9, seed=1), prompt(5)])):
        cache.reset()
        found = model.generate(**batch, past_key_values=cache, stopping_criteria=stop, **kwargs)
        assert torch.equal(found, alone(model, batch, **kwargs))


def test_freed_rows_are_refused_a_second_turn() -> None:
    model, inputs = llama(), padded([prompt(9), prompt(5, seed=1), prompt(7, seed=2)])
    pool = BlockPool(model, block_size=4)
    cache = pool.match_prefix(**inputs)
    found = model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    cache.free_rows(torch.tensor([False, True, False]))
    assert [length == 0 for length in cache.row_lengths] == [False, True, False]
    # What is left is indexed, and nothing of the freed row.
    mask = inputs["attention_mask"]
    assert pool.insert_prefix(cache, found, attention_mask=mask) == 9 + 2 + 7 + 2
    with pytest.raises(RuntimeError, match="Rows of this cache have been freed"), torch.no_grad():
        model(prompt(2).repeat(3, 1), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([0, 2]))
    with torch.no_grad():  # what the error says helps
        model(prompt(2).repeat(2, 1), past_key_values=cache)
    assert cache.row_lengths == [9 + 2 + 2, 7 + 2 + 2]
    cache.crop(-cache.get_seq_length())
    assert torch.equal(model.generate(**inputs, past_key_values=cache, max_new_tokens=3), found)


def test_rows_that_have_ended_give_their_blocks_back(model: Any) -> None:
    inputs = padded([prompt(20), prompt(9, seed=1), prompt(13, seed=2)])
    free_run = alone(model, inputs, max_new_tokens=12)
    ends = int(free_run[1, 20 + 3])  # row 1 at least ends at its fourth token
    kwargs = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0}
    expected = alone(model, inputs, **kwargs)
    pool = BlockPool(model, block_size=4)
    cache = PagedCache(pool=pool)
    stop = StoppingCriteriaList([FreeFinishedRows(cache, ends)])
    found = model.generate(**inputs, past_key_values=cache, stopping_criteria=stop, **kwargs)
    assert torch.equal(found, expected)
    ended = [bool((row[20:] == ends).any()) for row in expected]
    assert ended[1]
    if not all(ended):
        assert [length == 0 for length in cache.row_lengths] == ended
    pool.check()


# Random sequences against plain lists

WINDOW = 5
CONFIG = two_layer_config(WINDOW)


class PrefixMachine(RuleBasedStateMachine):
    """Caches and an index on one bounded pool; a model of both: lists of token ids.

    K of a token is a number for all that is in front of it and itself, so that a token which is
    read behind another beginning than its own is found out.
    """

    @initialize(block_size=st.integers(1, 5), num_blocks=st.integers(6, 30))
    def make(self, block_size: int, num_blocks: int) -> None:
        self.pool = BlockPool(CONFIG, block_size=block_size, num_blocks=num_blocks)
        self.caches: list[tuple[PagedCache, list[int]]] = []
        self.inserted: dict[str, list[list[int]]] = {"a": [], "b": []}

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=14), key=st.sampled_from(["a", "b"]))
    def match(self, ids: list[int], key: str) -> None:
        cache = self.pool.match_prefix(torch.tensor([ids]), extra_key=key)
        known = cache.get_seq_length()
        assert known < len(ids)
        best = max((_common(ids, other) for other in self.inserted[key]), default=0)
        assert known <= best
        self.caches.append((cache, ids[:known]))
        self._append(len(self.caches) - 1, ids[known:])

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def append(self, data: st.DataObject, ids: list[int]) -> None:
        self._append(self._choose(data), ids)

    def _append(self, at: int, ids: list[int]) -> None:
        cache, before = self.caches[at]
        numbers = [_number(before + ids[: n + 1]) for n in range(len(ids))]
        states = torch.tensor(numbers)[None, None, :, None].expand(1, 1, -1, 2)
        free, evictable = self.pool.num_free, self.pool.num_evictable
        try:
            for layer in range(2):
                cache.update(states, -states, layer)
        except PoolExhausted:
            # A row may have given back what its window has left behind, nothing else has changed.
            assert self.pool.num_free >= free
            assert self.pool.num_evictable >= evictable
            return
        self.caches[at] = (cache, before + ids)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), key=st.sampled_from(["a", "b"]))
    def insert(self, data: st.DataObject, key: str) -> None:
        cache, ids = self.caches[self._choose(data)]
        if ids:
            used = self.pool.num_free
            sequence = torch.tensor([ids])
            mask = torch.ones_like(sequence)  # as no model has told the cache
            self.pool.insert_prefix(cache, sequence, attention_mask=mask, extra_key=key)
            assert self.pool.num_free >= used  # what was known is stored once
            self.inserted[key].append(ids)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(0, 5))
    def crop(self, data: st.DataObject, count: int) -> None:
        at = self._choose(data)
        cache, ids = self.caches[at]
        count = min(count, len(ids))
        try:
            cache.crop(-count)
        except RuntimeError:  # the window has moved on
            return
        self.caches[at] = (cache, ids[: len(ids) - count])

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, ids = self.caches[self._choose(data)]
        self.caches.append((cache.fork(), ids))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def move_out_and_in(self, data: st.DataObject) -> None:
        at = self._choose(data)
        cache = self.caches[at][0]
        cache.offload()
        self.pool.check()
        try:
            cache.restore()
        except PoolExhausted:  # its blocks are another's as well, and now there are too few
            del self.caches[at]

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.caches.pop(self._choose(data))[0].free()

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        free, evictable = self.pool.num_free, self.pool.num_evictable
        freed = self.pool.evict(n)
        assert self.pool.num_free == free + freed
        assert freed >= min(n, evictable)

    @rule()
    def clear(self) -> None:
        self.pool.clear_prefixes()
        self.inserted = {"a": [], "b": []}

    def _choose(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.caches) - 1))

    @invariant()
    def all_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check()
        check_used(pool, [cache for cache, _ in self.caches])
        for cache, ids in self.caches:
            assert cache.get_seq_length() == len(ids)
            if ids:
                numbers = [_number(ids[: n + 1]) for n in range(len(ids))]
                for layer, reach in zip(cache.layers, (len(ids), WINDOW - 1), strict=True):
                    expected = numbers[max(len(ids) - reach, 0) :]
                    assert layer.keys[0, 0, :, 0].tolist() == expected
                    assert layer.values[0, 0, :, 1].tolist() == [-n for n in expected]

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.caches.clear()
            assert self.pool.num_used == 0
            self.pool.clear_prefixes()
            assert self.pool.num_free == self.pool.num_blocks


def _common(a: list[int], b: list[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _number(ids: list[int]) -> float:
    """Another number for each list of 0 and 1, exact in float32 up to 20 of them."""
    return float(int("1" + "".join(map(str, ids)), 2) % 2**24)


PrefixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPrefixes = PrefixMachine.TestCase


@pytest.mark.slow
def test_many_more_sequences() -> None:
    long = settings(max_examples=400, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(PrefixMachine, settings=long)
