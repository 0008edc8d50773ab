"""Layers that keep other states than K/V beside ours: rows move with the K/V, failures are seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_paged import BlockPool, PagedCache, PoolExhausted

from .compare import text_inputs
from .models import is_tested
from .test_causal import tiny

STATEFUL = [
    *filter(is_tested, ("jamba", "lfm2", "zamba", "falcon_h1", "qwen3_next", "deepseek_v32")),
    *filter(is_tested, ("inkling_text", "dory")),
]
RECURRENT = [*filter(is_tested, ("jamba", "qwen3_next", "falcon_h1"))]
CROPPABLE = ("lfm2", "deepseek_v32")  # convolutions and indexers, but no recurrent states


def step(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache).logits


def caches(model: PreTrainedModel) -> list[Cache]:
    return [DynamicCache(config=model.config), PagedCache(config=model.config, block_size=4)]


def same(found: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found[1], found[0], atol=3e-4, rtol=0)


MOVES: dict[str, Any] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", STATEFUL)
def test_rows_move_with_their_states(name: str, move: str) -> None:
    model, logits = tiny(name, "hf_paged"), []
    ids = text_inputs(padding=0)["input_ids"]
    for cache in caches(model):
        step(model, cache, ids)
        if move == "reorder" or isinstance(cache, PagedCache):
            MOVES[move](cache)
        else:  # transformers' layers of recurrent states have no other way
            rows = {"select": [1, 0], "repeat": [0, 0, 1, 1]}[move]
            cache.reorder_cache(torch.tensor(rows))
        logits.append(step(model, cache, ids[:1, :1].repeat(4 if move == "repeat" else 2, 1)))
    same(logits)


@pytest.mark.parametrize("name", [*filter(is_tested, ("jamba", "lfm2"))])
def test_hidden_tokens(name: str) -> None:
    model, logits = tiny(name, "hf_paged"), []
    ids = text_inputs(padding=0)["input_ids"]
    mask = torch.ones(len(ids), ids.shape[1] + 2, dtype=torch.long)
    for cache in caches(model):
        for start, stop in ((0, -2), (-2, -1), (-1, None)):
            given = mask[:, :stop].clone()
            given[0, 1] = stop is not None  # the last step hides a token
            new = ids if start == 0 else ids[:, :1]
            with torch.no_grad():
                out = model(input_ids=new, attention_mask=given, past_key_values=cache)
        logits.append(out.logits)
    same(logits)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_copy_goes_its_own_way(name: str) -> None:
    model = tiny(name, "hf_paged")
    ids = text_inputs(padding=0)["input_ids"]
    cache = PagedCache(config=model.config, block_size=4)
    step(model, cache, ids)
    branch = copy.deepcopy(cache)
    step(model, branch, ids[:, 3:4])
    straight = PagedCache(config=model.config, block_size=4)
    step(model, straight, ids)
    same([step(model, straight, ids[:, 7:8]), step(model, cache, ids[:, 7:8])])
    cache.pool.check()


@pytest.mark.parametrize("name", CROPPABLE)
def test_crop(name: str) -> None:
    model, logits = tiny(name, "hf_paged"), []
    ids = text_inputs(padding=0)["input_ids"]
    for cache in caches(model):
        cache.activate_past_recording()
        step(model, cache, ids[:, :12])
        cache.crop(0)
        step(model, cache, ids[:, 12:15])
        cache.crop(-2)
        assert cache.get_seq_length() == 13
        logits.append(step(model, cache, ids[:, 13:]))
    same(logits)


@pytest.mark.parametrize(
    ("name", "is_recording", "count", "error"),
    [
        *((name, True, 2, RuntimeError) for name in RECURRENT),
        ("lfm2", True, 50, ValueError),
        ("deepseek_v32", True, 50, ValueError),
        ("lfm2", False, 2, RuntimeError),
        ("jamba", False, 0, RuntimeError),
    ],
)
def test_a_refused_crop_changes_nothing(
    name: str, is_recording: bool, count: int, error: type[Exception]
) -> None:
    """Recurrent states cannot be rolled back: K/V that were would go on with the wrong ones."""
    model = tiny(name, "hf_paged")
    ids = text_inputs(padding=0)["input_ids"]
    cache, expected = (PagedCache(config=model.config, block_size=4) for _ in range(2))
    for each in (cache, expected):
        if is_recording:
            each.activate_past_recording()
        step(model, each, ids[:, :12])
    with pytest.raises(error, match=r"[Cc]rop"):
        cache.crop(-count)
    assert cache.get_seq_length() == 12
    assert torch.equal(step(model, cache, ids[:, 12:13]), step(model, expected, ids[:, 12:13]))


@pytest.mark.parametrize("name", ["jamba", "deepseek_v32"])
def test_a_failed_forward_is_not_continued(name: str) -> None:
    """K/V can be rolled back, the other states cannot: an error until the cache is reset."""
    model = tiny(name, "hf_paged")
    ids = text_inputs(padding=0)["input_ids"]
    cache = PagedCache(config=model.config, block_size=4)
    expected = step(model, PagedCache(config=model.config, block_size=4), ids)
    step(model, cache, ids)
    layers = [i for i in range(len(cache.layers)) if i in cache.pool.storage.group_of_layer]
    hook = model.model.layers[layers[0]].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, ids[:, :1])
    hook.remove()
    with pytest.raises(RuntimeError, match="reset"):
        step(model, cache, ids[:, :1])
    cache.reset()
    assert torch.equal(step(model, cache, ids), expected)


def test_a_full_pool_is_noticed_after_other_states_have_moved_on() -> None:
    """Recurrent layers in front of the first K/V: what follows would be wrong, so it is refused."""
    model = tiny("jamba", "hf_paged")
    ids = text_inputs(padding=0)["input_ids"]
    cache = PagedCache(pool=BlockPool(model.config, block_size=4, num_blocks=10))
    step(model, cache, ids[:, :8])
    with pytest.raises(PoolExhausted):
        step(model, cache, ids.repeat(1, 9))
    with pytest.raises(RuntimeError, match="reset"):
        step(model, cache, ids[:, 8:9])
    cache.reset()
    step(model, cache, ids[:, :8])


@pytest.mark.parametrize("name", ["jamba", "deepseek_v32"])
def test_one_row_does_not_serve_many(name: str) -> None:
    """Its states are of one row; repeated first, it does."""
    model = tiny(name, "hf_paged")
    ids = text_inputs(padding=0)["input_ids"][:1]
    cache = PagedCache(config=model.config, block_size=4)
    step(model, cache, ids)
    with pytest.raises((ValueError, RuntimeError)):
        step(model, copy.deepcopy(cache), ids[:, :1].repeat(3, 1))
    one = step(model, copy.deepcopy(cache), ids[:, :1])
    cache.batch_repeat_interleave(3)
    same([one.repeat(3, 1, 1), step(model, cache, ids[:, :1].repeat(3, 1))])


@pytest.mark.parametrize("name", ["falcon_h1", "deepseek_v32"])
def test_prefixes_are_not_reused(name: str) -> None:
    """Also where the K/V of every layer are in blocks: the other states would be missing."""
    with pytest.raises(ValueError, match="other states"):
        BlockPool(tiny(name).config).match_prefix(text_inputs()["input_ids"])


def test_layers_that_never_get_keys() -> None:
    """A model of fewer layers than its config says: no step is ever known to be complete."""
    model = tiny("llama", "hf_paged")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    config.layer_types = None
    ids = text_inputs(padding=0)["input_ids"]
    for sizes in ((20, 1), (1, 1)):
        cache = PagedCache(config=config, block_size=4)
        step(model, cache, ids[:, : sizes[0]])
        with pytest.raises(RuntimeError, match="number of layers"):
            step(model, cache, ids[:, sizes[0] : sum(sizes)])


def test_a_failed_first_forward_can_be_tried_again() -> None:
    model = tiny("llama", "hf_paged")
    ids = text_inputs(padding=0)["input_ids"]
    cache = PagedCache(config=model.config, block_size=4)
    expected = step(model, PagedCache(config=model.config, block_size=4), ids)
    hook = model.model.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, ids)
    hook.remove()
    assert torch.equal(step(model, cache, ids), expected)


@pytest.mark.parametrize(
    ("name", "move"),
    [
        *(("falcon_h1", move) for move in (*MOVES, "reset")),
        ("lfm2", "crop"),  # recurrent states are never cropped
    ],
)
def test_a_move_that_is_cut_short_is_noticed(
    name: str, move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the K/V have moved, and the other states have not yet."""
    moves = MOVES | {"crop": lambda cache: cache.crop(-2), "reset": lambda cache: cache.reset()}
    model = tiny(name, "hf_paged")
    ids = text_inputs(padding=0)["input_ids"]
    cache = PagedCache(config=model.config, block_size=4)
    cache.activate_past_recording()
    step(model, cache, ids)
    with monkeypatch.context() as patch:
        for method in ("reorder_cache", "crop", "reset"):
            patch.setattr(LinearAttentionLayer, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            moves[move](cache)
    with pytest.raises(RuntimeError, match="reset"):
        step(model, cache, ids[:, :1])
    cache.reset()
    expected = step(model, PagedCache(config=model.config, block_size=4), ids)
    assert torch.equal(step(model, cache, ids), expected)
    with pytest.raises(IndexError):
        cache.batch_select_indices(torch.tensor([9]))
    step(model, cache, ids[:, :1])  # what was refused has changed nothing


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt
