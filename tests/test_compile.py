"""Forwards that torch.compile traces: a caller's, and generate's where a cache has compile=True."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from architectures.models import BASELINE
from architectures.test_causal import tiny as tiny_architecture
from conftest import TINY, ragged_ids, tiny
from transformers import Cache, CompileConfig, DynamicCache, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from hf_paged import BlockPool, PagedCache, PoolExhausted
from hf_paged.mask import _is_pattern


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("attention", ["hf_paged", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_compiled_forwards_equal_dynamic_cache(
    tiny_model: Callable[[str], PreTrainedModel], name: str, attention: str
) -> None:
    """Prompts, a chunk and single tokens, past a window's end; the last one not compiled."""
    model = tiny_model(name)
    inputs = ragged_ids([19, 30, 30])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    dynamic, paged = DynamicCache(config=model.config), PagedCache(config=model.config)
    compiled = torch.compile(model, backend="eager")
    for start, stop in ((0, 20), (20, 27), (27, 28), (28, 29), (29, 30)):
        step = {
            "input_ids": ids[:, start:stop],
            "attention_mask": mask[:, :stop],
            "position_ids": positions[:, start:stop],
        }
        with torch.no_grad():
            model.set_attn_implementation("eager")
            expected = model(**step, past_key_values=dynamic).logits
            model.set_attn_implementation(attention)
            forward = model if stop == 30 else compiled
            found = forward(**step, past_key_values=paged).logits
        is_token = mask[:, start:stop].bool()
        torch.testing.assert_close(found[is_token], expected[is_token], atol=1e-4, rtol=1e-4)
    assert paged.report().dense_calls["torch.compile"] >= len(paged.pool.storage.group_of_layer)
    paged.pool.check()


@pytest.mark.parametrize("attention", ["hf_paged", "sdpa"])
def test_generate_with_compiled_layers(attention: str) -> None:
    """As accelerate compiles a model by its regions; the mask is made outside of them."""
    model = tiny("llama")
    kwargs = {**ragged_ids([3, 21, 9]), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(past_key_values=DynamicCache(config=model.config), **kwargs)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    model.set_attn_implementation(attention)
    cache = PagedCache(config=model.config)
    assert torch.equal(model.generate(past_key_values=cache, **kwargs), expected)
    report = cache.report()
    assert report.dense_calls == {"torch.compile": 8 * len(model.model.layers)}
    assert report.tokens == (3 + 21 + 9 + 3 * 7 if attention == "hf_paged" else 3 * (21 + 7))


# -- compile=True: generate compiles decode steps --------------------------------------------------


def compiling(backend: str = "eager", fullgraph: bool = True) -> CompileConfig:
    """What makes generate compile on the CPU too; Dynamo traces, and the graph runs as it is."""
    config = CompileConfig(fullgraph=fullgraph, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def architecture(name: str) -> PreTrainedModel:
    model = tiny_architecture(name, BASELINE.get(name))
    model.generation_config.eos_token_id = None
    return model


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def count_graphs() -> None:
    torch._dynamo.utils.counters.clear()


def generated(
    model: PreTrainedModel, cache: Cache, lengths: Sequence[int] = (12, 9, 5), **kwargs: Any
) -> torch.Tensor:
    is_paged = isinstance(cache, PagedCache)
    model.set_attn_implementation("hf_paged" if is_paged else "eager")
    if is_paged:
        kwargs.setdefault("compile_config", compiling())
    torch.manual_seed(0)
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(**ragged_ids(list(lengths)), past_key_values=cache, **options)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "long": {"max_new_tokens": 70},  # tables and the pool grow
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "return sequences": {"do_sample": True, "num_return_sequences": 2},
    "rows that end": {"eos_token_id": list(range(30))},
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_steps_give_the_same_tokens(
    tiny_model: Callable[[str], PreTrainedModel], way: str
) -> None:
    model, kwargs = tiny_model("llama"), WAYS[way]
    expected = generated(model, DynamicCache(config=model.config), **kwargs)
    cache = PagedCache(config=model.config, block_size=4, compile=True)
    assert torch.equal(generated(model, cache, **kwargs), expected)
    report = cache.report()
    is_compiled = way != "beams"  # transformers itself compiles no beam search
    steps = (cache.state.num_steps - 1) * is_compiled  # the prompt is computed eagerly
    assert report.compiled_calls == steps * len(model.model.layers)
    assert (report.dense_calls, report.eager_reason) == ({}, None)
    assert num_graphs() == is_compiled
    cache.pool.check()


@pytest.mark.parametrize("name", TINY)
def test_every_kind_of_layer_is_one_graph(
    tiny_model: Callable[[str], PreTrainedModel], name: str
) -> None:
    """Windows, mixed groups, softcap, sinks; transformers itself never compiles Llama 4."""
    model = tiny_model(name)
    expected = generated(model, DynamicCache(config=model.config))
    for _ in range(2):  # the second cache finds the graph of the first
        cache = PagedCache(config=model.config, block_size=4, compile=True)
        assert torch.equal(generated(model, cache), expected)
        assert (cache.report().compiled_calls > 0) == (name != "llama4_text")
        assert num_graphs() == (name != "llama4_text")
        cache.pool.check()


def test_other_batch_sizes_need_one_more_graph_at_most(
    tiny_model: Callable[[str], PreTrainedModel],
) -> None:
    model = tiny_model("llama")
    for lengths in ([9, 4], [7], [3, 8, 5], [6] * 4, [5] * 7, [9, 4]):
        expected = generated(model, DynamicCache(config=model.config), lengths)
        cache = PagedCache(config=model.config, compile=True)
        assert torch.equal(generated(model, cache, lengths), expected)
    assert num_graphs() <= 3  # of one row, of two, and of any number


def test_a_compiled_step_behind_a_known_prefix(
    tiny_model: Callable[[str], PreTrainedModel],
) -> None:
    """Prompts are indexed, what compiled steps have computed is not: nobody sees its positions."""
    model = tiny_model("llama")
    pool = BlockPool(model, block_size=4)
    expected = generated(model, DynamicCache(config=model.config))
    cache = PagedCache(pool=pool, compile=True)
    assert pool.insert_prefix(cache, generated(model, cache)) == 12 + 8 + 4
    inputs = ragged_ids([12, 9, 5])
    with pool.match_prefix(**inputs, compile=True) as found:
        assert found.get_seq_length() > 0
        assert torch.equal(generated(model, found), expected)
        assert found.report().compiled_calls > 0
        fork = found.fork()
    assert fork.is_compileable
    pool.check()


def test_a_full_pool_in_a_compiled_step_loses_nothing(
    tiny_model: Callable[[str], PreTrainedModel],
) -> None:
    model = tiny_model("llama")
    cache = PagedCache(config=model.config, block_size=4, num_blocks=14, compile=True)
    with pytest.raises(PoolExhausted):
        generated(model, cache, max_new_tokens=60)
    assert cache.row_lengths == [20, 17, 13]
    cache.pool.check()
    ids = torch.cat([torch.zeros(3, 8, dtype=torch.long), ragged_ids([12, 9, 5])["input_ids"]], 1)
    kept = PagedCache(config=model.config, block_size=4)
    generated(model, kept, max_new_tokens=9)
    for layer, other in zip(cache.layers, kept.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
    assert ids.shape[1] == cache.get_seq_length()


def test_a_compiled_forward_that_fails_is_rolled_back(
    tiny_model: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    cache = PagedCache(config=model.config, block_size=4, compile=True)
    generated(model, cache, max_new_tokens=4)
    before, layer = cache.row_lengths, cache.layers[2]

    def fail(*args: Any) -> None:
        raise InterruptedError

    storage = cache.pool.groups[0].storage[layer.index]
    monkeypatch.setattr(storage, "write", fail)
    again = {"attention_mask": torch.ones(3, 16, dtype=torch.long)}
    again["attention_mask"][:, :12] = ragged_ids([12, 9, 5])["attention_mask"]
    ids = torch.randint(3, 90, (3, 16))
    kwargs = {**again, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 3}
    with pytest.raises(InterruptedError):
        model.generate(ids, past_key_values=cache, compile_config=compiling(), **kwargs)
    assert cache.row_lengths == before
    monkeypatch.undo()
    cache.pool.check()
    model.generate(ids, past_key_values=cache, compile_config=compiling(), **kwargs)
    assert cache.get_seq_length() == 18


def test_a_compileable_cache_runs_eagerly_where_nobody_compiles(
    tiny_model: Callable[[str], PreTrainedModel],
) -> None:
    for name in ("llama", "gemma3_text"):
        model = tiny_model(name)
        expected = generated(model, DynamicCache(config=model.config))
        cache = PagedCache(config=model.config, block_size=4, compile=True)
        assert torch.equal(generated(model, cache, compile_config=None), expected)
        report = cache.report()
        assert (report.compiled_calls, report.dense_calls) == (0, {})


def test_what_cannot_be_compiled_says_why() -> None:
    """MPT reads K/V itself, so its graph breaks at each layer; Jamba keeps recurrent states."""
    for name, reason in (("mpt", "reads K/V itself"), ("jamba", "other states than K/V")):
        model = architecture(name)
        expected = generated(model, DynamicCache(config=model.config))
        cache = PagedCache(config=model.config, compile=True)
        config = compiling(fullgraph=False)
        assert torch.equal(generated(model, cache, compile_config=config), expected)
        report = cache.report()
        assert report.compiled_calls == 0
        assert reason in str(report.eager_reason)
        assert not cache.is_compileable
    assert "not asked" in str(PagedCache(config=model.config).report().eager_reason)
    llama = tiny("llama")
    llama.set_attn_implementation("sdpa")
    assert not PagedCache(config=llama.config, compile=True).is_compileable


def test_a_mask_that_adds_to_the_pattern_is_not_taken_for_it() -> None:
    """In decode steps of a compileable cache transformers gives no other hint than the function."""
    assert _is_pattern(causal_mask_function)
    assert _is_pattern(sliding_window_causal_mask_function(7))
    assert _is_pattern(chunked_causal_mask_function(7, torch.zeros(2)))

    def every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key % 2 == 0

    for combine in (and_masks, or_masks):
        assert not _is_pattern(combine(causal_mask_function, every_other))
        assert not _is_pattern(combine(causal_mask_function, causal_mask_function))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_inductors_code_gives_the_same_tokens(
    tiny_model: Callable[[str], PreTrainedModel], name: str
) -> None:
    model = tiny_model(name)
    expected = generated(model, DynamicCache(config=model.config), max_new_tokens=200)
    for _ in range(2):
        cache = PagedCache(config=model.config, block_size=4, compile=True)
        config = compiling("inductor")
        found = generated(model, cache, max_new_tokens=200, compile_config=config)
        assert torch.equal(found, expected)
    assert num_graphs() == 1


KINDS = (  # plain, learned positions, MoE, windows, softcap, sinks, several groups, partial rope
    *("gpt2", "opt", "qwen2", "qwen3_moe", "mixtral", "mistral", "gemma2", "gpt_oss", "cohere2"),
    *("deepseek_v3", "phi", "gpt_neox", "olmo2", "gptj", "gpt_bigcode", "bart"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_architectures_give_the_same_tokens_compiled(name: str) -> None:
    model = architecture(name)
    expected = generated(model, DynamicCache(config=model.config))
    cache = PagedCache(config=model.config, block_size=4, compile=True)
    config = compiling(fullgraph=name not in ("deepseek_v3", "bart"))
    assert torch.equal(generated(model, cache, compile_config=config), expected)
    assert (cache.report().compiled_calls > 0) == (name != "deepseek_v3")
    cache.pool.check()
