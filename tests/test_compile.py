"""A forward that torch.compile traces: right, through K/V that are gathered first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import ragged_ids, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_paged import PagedCache


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
