"""Assisted decoding and prompt lookup on caches that hold tokens: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ragged_ids, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_paged import BlockPool, PagedCache

Build = Callable[[str], PreTrainedModel]
NAMES = ["llama", "gemma3_text", "mistral"]
IDS = ragged_ids([12])["input_ids"].repeat(1, 2)  # so that there is something to look up
LOOKUP = {"prompt_lookup_num_tokens": 3}


@pytest.fixture(params=["lookup", "assistant"])
def how(request: pytest.FixtureRequest, tiny_model: Build) -> dict[str, Any]:
    """What tells generate to guess tokens."""
    return LOOKUP if request.param == "lookup" else {"assistant_model": tiny_model("llama")}


def paged(model: PreTrainedModel, attention: str = "hf_paged") -> PreTrainedModel:
    model.set_attn_implementation(attention)
    return model


def generate(model: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
    return model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, **kwargs)


@torch.no_grad()
def holding(model: Any, tokens: int, **kwargs: Any) -> PagedCache:
    cache = PagedCache(**(kwargs or {"config": model.config}), block_size=4)
    for part in IDS[:, :tokens].split(7, 1):  # so that keys differ by rounding
        model(part, past_key_values=cache)
    return cache


@pytest.mark.parametrize("attention", ["hf_paged", "eager"])
@pytest.mark.parametrize("tokens", [4, 16, 23, 24])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_is_in_the_cache_is_refused(
    tiny_model: Build, how: dict[str, Any], name: str, tokens: int, attention: str
) -> None:
    """transformers computes it whole, behind itself, so that other tokens came out."""
    model = paged(tiny_model(name), attention)
    cache = holding(model, tokens)
    with pytest.raises(ValueError, match="pass a fresh cache, or only the new input_ids"):
        generate(model, IDS, cache, **how)
    assert cache.row_lengths == [tokens]
    cache.pool.check()
    longer = F.pad(IDS, (0, 1), value=5)  # as the cache may hold all of the prompt
    expected = generate(model, longer, DynamicCache(config=model.config))
    assert torch.equal(generate(model, longer, cache), expected)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_so_is_one_that_was_rounded(kind: str) -> None:
    model = paged(tiny("llama"))
    dtype = getattr(torch, kind)
    pool = BlockPool(model.config, block_size=4, kv_dtype=dtype if dtype.itemsize == 1 else None)
    if dtype.itemsize == 2:
        model.to(dtype)
    cache = holding(model, 20, pool=pool)
    with pytest.raises(ValueError, match="pass a fresh cache"):
        generate(model, IDS, cache, **LOOKUP)


def test_so_are_known_prompts_and_a_second_time(tiny_model: Build) -> None:
    model = paged(tiny_model("llama"))
    pool = BlockPool(model, block_size=4)
    expected = generate(model, IDS, DynamicCache(config=model.config))
    with PagedCache(pool=pool) as cache:
        found = generate(model, IDS, cache, **LOOKUP)
        assert torch.equal(found, expected)
        with pytest.raises(ValueError, match="pass a fresh cache"):
            generate(model, IDS, cache, **LOOKUP)
        pool.insert_prefix(cache, found)
    with pytest.raises(ValueError, match="pass a fresh cache"):
        generate(model, IDS, pool.match_prefix(IDS), **LOOKUP)


@pytest.mark.parametrize("new", [slice(None), slice(20, None)], ids=["all", "what is new"])
def test_a_padded_prompt_is_told_the_same(tiny_model: Build, new: slice) -> None:
    """The error was that the mask must cover all, which it did; transformers cuts it to the ids."""
    model = paged(tiny_model("llama"))
    ids, mask = F.pad(IDS, (4, 0)), F.pad(torch.ones_like(IDS), (4, 0))
    cache = PagedCache(config=model.config).prefill(model, ids[:, :21], mask[:, :21])
    with pytest.raises(ValueError, match="assisted decoding and prompt lookup take a fresh cache"):
        generate(model, ids[:, new], cache, attention_mask=mask, **LOOKUP)


@pytest.mark.parametrize("tokens", [4, 16, 23])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_new_goes_behind_what_is_there(
    tiny_model: Build, how: dict[str, Any], name: str, tokens: int
) -> None:
    """A conversation that goes on so is right, and not refused, also where it repeats itself."""
    model = paged(tiny_model(name))
    cache = holding(model, tokens)
    turn = torch.cat([IDS[:, :3], ragged_ids([20], seed=1)["input_ids"]], 1)
    whole = torch.cat([IDS[:, :tokens], turn], 1)
    expected = generate(model, whole, DynamicCache(config=model.config))
    found = generate(model, turn, cache, attention_mask=torch.ones_like(whole), **how)
    assert torch.equal(found, expected[:, tokens:])
