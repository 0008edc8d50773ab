"""Prompts with images whose beginning is reused, told apart by the image that `extra_key` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

from hf_paged import BlockPool, PagedCache
from hf_paged.core.model_spec import longest_prefix
from hf_paged.prefill import argument_names, cache_argument

from . import test_causal
from .compare import Inputs, generate, greedy, same_logits, text_inputs
from .models import BASELINE, IS_NEWEST, OTHER_ATTENTION, REFUSED
from .test_multimodal import prompt, tiny

FIRST, OTHER = "what is this a picture or sound of", "what is this again please"
PLACEHOLDERS = 4  # at the beginning of a prompt of LLaVA


@pytest.fixture(scope="module")
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny("llava"), tiny("llava", "hf_paged")


def reuse(
    models: tuple[PreTrainedModel, PreTrainedModel], pool: BlockPool, text: str, image: int
) -> int:
    """Generate behind what is known of a text and an image, compare, and say how much that was.

    The image is given where it is not known, as generate has it behind any cache.
    """
    plain, model = models
    inputs = prompt("llava", (text,), image)
    expected = greedy(plain, DynamicCache(config=plain.config), inputs)
    with pool.match_prefix(**ids_of(inputs), extra_key=f"image {image}") as cache:
        known = cache.get_seq_length()
        if known:
            assert known > PLACEHOLDERS
            del inputs["pixel_values"]
        found = greedy(model, cache, inputs)
        assert torch.equal(found.sequences, expected.sequences)
        same_logits(found, expected)
        pool.insert_prefix(cache, found.sequences, extra_key=f"image {image}")
        pool.check()
    return known


def ids_of(inputs: Inputs) -> dict[str, Any]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def test_a_prompt_is_reused_with_its_own_image_only(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    pool = BlockPool(models[1], block_size=4)
    width = prompt("llava", (FIRST,), 0)["input_ids"].shape[1]
    assert reuse(models, pool, FIRST, 0) == 0
    assert reuse(models, pool, FIRST, 1) == 0  # the same tokens
    assert reuse(models, pool, FIRST, 0) == width - 1
    assert reuse(models, pool, FIRST, 1) == width - 1
    assert reuse(models, pool, OTHER, 0) == PLACEHOLDERS + 3  # "what is this"


def test_a_match_never_ends_in_an_image(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """Half of it is known: the model takes it as a whole or not at all."""
    pool = BlockPool(models[1], block_size=2)
    reuse(models, pool, FIRST, 0)
    pool.evict(pool.num_evictable - 1)
    assert pool.num_evictable == 1
    assert reuse(models, pool, FIRST, 0) == 0


def test_an_image_that_is_seen_both_ways_is_not_indexed() -> None:
    """Gemma 3 lets the tokens of an image see each other, so none has K/V of its past alone."""
    model, inputs = tiny("gemma3", "hf_paged"), prompt("gemma3", (FIRST,), 0)
    pool, key = BlockPool(model, block_size=4), {"extra_key": "image 0"}
    with pool.match_prefix(**ids_of(inputs), **key) as cache:
        out = greedy(model, cache, inputs)
        assert pool.insert_prefix(cache, out.sequences, **key) == 0
    assert pool.match_prefix(**ids_of(inputs), **key).get_seq_length() == 0


def test_an_image_that_nothing_names_is_refused(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    inputs, pool = ids_of(prompt("llava", (FIRST,), 0)), BlockPool(models[1], block_size=4)
    with pytest.raises(ValueError, match="name these by extra_key"):
        pool.match_prefix(**inputs)
    with (
        pool.match_prefix(**inputs, extra_key="image 0") as cache,
        pytest.raises(ValueError, match="name these by extra_key"),
    ):
        pool.insert_prefix(cache, inputs["input_ids"])
    text = inputs["input_ids"][:, PLACEHOLDERS:]
    assert pool.match_prefix(text).get_seq_length() == 0


# Nothing of them is indexed: their masks are more than causal or not asked for, or they add tokens.
NOT_INDEXED = {"cpmant", "doge", "gemma4_unified", "mpt", "prophetnet", "xlm"}
CAUSAL = [
    param
    for param in test_causal.NAMES
    if param.values[0] not in {**REFUSED, **OTHER_ATTENTION, **({} if IS_NEWEST else BASELINE)}
]


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or the words of its refusal."""
    try:
        return call()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", CAUSAL)
def test_what_is_indexed_is_what_a_prompt_has_alone(name: str) -> None:
    """In all architectures: of padded prompts too, not of other positions, and to the same end."""
    model, inputs, padding = test_causal.tiny(name, "hf_paged"), text_inputs(), 7
    pool = BlockPool(model, block_size=4)
    found = attempt(lambda: pool.match_prefix(**inputs))
    if "cannot be reused" in str(found):
        return
    counts_padding = "counts padding as positions" in str(found)
    assert isinstance(found, PagedCache) or counts_padding
    alone = {key: value[1:, padding:] for key, value in inputs.items()}
    held, fresh = [], []
    for given in (inputs, alone):
        with PagedCache(pool=pool) as cache:
            out = generate(model, cache, given, max_new_tokens=3).sequences
            fresh.append(attempt(lambda: pool.insert_prefix(cache, out)))  # noqa: B023
            parts = [part for layer in cache.layers for part in (layer.keys, layer.values)]
            held.append([part[-1, :, -7:] for part in parts if part is not None])
        if "cannot be reused" in str(fresh[-1]):
            return
    is_indexed = fresh[0] == 23 + 16
    if IS_NEWEST:
        assert is_indexed == (name not in NOT_INDEXED and not counts_padding)
    if not is_indexed:
        assert fresh[0] == 0 or isinstance(fresh[0], str)
        return
    for padded, own in zip(*held, strict=True):
        torch.testing.assert_close(padded, own, atol=1e-3, rtol=0)
    ids = torch.cat([out, text_inputs(rows=1, width=5, padding=0)["input_ids"]], 1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pool.match_prefix(**turn) as cache:
        assert cache.get_seq_length() == 16
        again = generate(model, cache, turn, max_new_tokens=3)
    same_logits(again, generate(model, DynamicCache(config=model.config), turn, max_new_tokens=3))
    if "position_ids" in argument_names(model):
        ids, moved = alone["input_ids"], torch.arange(3, 17)[None]
        pool.clear_prefixes()
        with PagedCache(pool=pool) as cache, torch.no_grad():
            model(input_ids=ids, position_ids=moved, **cache_argument(model, cache))
            assert pool.insert_prefix(cache, ids) == 0


def test_positions_that_depend_on_the_last_prompt_are_refused() -> None:
    """In all models of transformers that keep `rope_deltas`, by their config or their decoder's."""
    folder = Path(transformers.__file__).parent / "models"
    files = [path for path in folder.glob("*/modeling_*.py") if "rope_deltas" in path.read_text()]
    assert len(files) >= 10
    for path in files:
        kind = path.parent.name
        whole = CONFIG_MAPPING[kind]()
        decoder = whole.get_text_config(decoder=True)
        # Some have the decoder of a model of text alone.
        for given in [whole, decoder] if kind in decoder.model_type else [whole]:
            with pytest.raises(ValueError, match="offset of the last prompt's positions"):
                longest_prefix(given)
