"""Changing what a cache holds: what is written elsewhere raises, and `edit` reaches the blocks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ragged_ids
from interrupts import interrupt
from transformers import DynamicCache, PreTrainedModel

from hf_paged import BlockPool, PagedCache, PoolExhausted
from hf_paged.mask import paged_mask
from hf_paged.view import LazyMask

Build = Callable[[str], PreTrainedModel]
LENGTHS = [13, 6]  # the second row begins with 7 columns of padding


def prefilled(model: PreTrainedModel, cache: Any, lengths: list[int] | None = None) -> Any:
    inputs = ragged_ids(lengths or LENGTHS)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**inputs, position_ids=positions, past_key_values=cache)
    return cache


@pytest.fixture
def model(tiny_model: Build) -> PreTrainedModel:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    return model


@pytest.fixture
def cache(model: PreTrainedModel) -> PagedCache:
    return prefilled(model, PagedCache(config=model.config, block_size=4))


def contents(cache: PagedCache) -> list[torch.Tensor]:
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def unchanged(cache: PagedCache, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, contents(cache), before))


# What is written to a copy raises

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zero_": lambda keys: keys.zero_(),
    "item": lambda keys: keys.__setitem__((0, 0, 0, 0), 1.0),
    "slice": lambda keys: keys[:, :, :4].__setitem__(slice(None), 0.0),
    "slice.mul_": lambda keys: keys[:, :, 2:].mul_(2),
    "transposed": lambda keys: keys.transpose(1, 2)[0].fill_(1),
    "viewed": lambda keys: keys[:, :, 0].view(2, 32).add_(1),
    "one of many": lambda keys: keys.unbind(0)[1].zero_(),
    "+=": lambda keys: keys.__iadd__(1),
    "detached": lambda keys: keys.detach().zero_(),
    "data": lambda keys: keys.data.zero_(),
    "new data": lambda keys: setattr(keys, "data", torch.zeros(2, 2, 13, 16)),
    "index_copy_": lambda keys: keys.index_copy_(2, torch.tensor([0]), keys[:, :, 1:2]),
    "out": lambda keys: torch.add(keys, 1, out=keys),
    "foreach": lambda keys: torch._foreach_add_([torch.zeros(1), keys], 1.0),
    "inplace relu": lambda keys: torch.nn.functional.relu(keys, inplace=True),
    "init": lambda keys: torch.nn.init.zeros_(keys),
    "masked_fill_": lambda keys: keys.masked_fill_(keys > 0, 0),
    "resize_": lambda keys: keys.resize_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_in_place_writes_raise_and_name_the_way(cache: PagedCache, write: str) -> None:
    """`cache.layers[0].keys.zero_()` went into a copy, and said nothing."""
    before = contents(cache)
    way = r"never reach its blocks; .* `with cache\.edit\({}\) as \(keys, values\): \.\.\.`"
    with pytest.raises(RuntimeError, match=way.format("2|layer")):
        WRITES[write](cache.layers[2].keys)
    with pytest.raises(RuntimeError, match=way.format("2|layer")):
        WRITES[write](cache.layers[2].values)
    for states in list(cache)[2][:2]:
        with pytest.raises(RuntimeError, match="never reach its blocks"):
            WRITES[write](states)
    assert unchanged(cache, before)


def test_parts_of_what_update_returns_cannot_be_written_to(cache: PagedCache) -> None:
    """A slice of a paged view was an ordinary tensor, whose changes no later step saw."""
    states = torch.ones(2, 2, 1, 16)
    keys, _ = cache.update(states, states, 0)
    for write in (lambda: keys[:, :, :4].zero_(), lambda: keys.transpose(1, 2).add_(1)):
        with pytest.raises(RuntimeError, match="never reach its blocks"):
            write()
    assert type(keys[:, :, :4] + 0) is torch.Tensor


def test_masks_and_parts_of_them_cannot_be_written_to(cache: PagedCache) -> None:
    """A model that changed a part of its mask in place changed a copy, and attended as before."""
    length, offset = cache.get_mask_sizes(3, 0)
    mask = paged_mask(2, 3, length, 13, offset)
    assert isinstance(mask, LazyMask)
    for write in (
        lambda: mask.fill_(True),
        lambda: mask.__setitem__((..., 0), True),
        lambda: mask[..., :4].masked_fill_(torch.tensor(True), True),
        lambda: mask.transpose(0, 1)[0].logical_not_(),
    ):
        with pytest.raises(RuntimeError, match=r"a change would be lost; write into a clone\(\)"):
            write()
    assert type(mask[..., :4] | False) is torch.Tensor


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda keys: keys.sum(),
    "cat": lambda keys: torch.cat([keys, keys], 2),
    "matmul": lambda keys: keys @ keys.mT,
    "clone": lambda keys: keys.clone(),
    "dtype": lambda keys: keys.double(),
    "index": lambda keys: keys[:, :, torch.tensor([0, 2])],
    "copy": lambda keys: torch.empty_like(keys).copy_(keys),
    "into": lambda keys: torch.zeros(2, 2, 13, 16).index_add_(0, torch.tensor([0, 1]), keys),
    "topk": lambda keys: keys.norm(dim=-1).topk(3)[1],
    "deepcopy": lambda keys: copy.deepcopy(keys),
    "cloned, then written to": lambda keys: keys[:, :, :2].clone().zero_(),
    "gradient": lambda keys: keys.clone().requires_grad_(),
    "attention": lambda keys: torch.nn.functional.scaled_dot_product_attention(keys, keys, keys),
    "vmap": lambda keys: torch.func.vmap(lambda row: row * 2)(keys),
}


@pytest.mark.parametrize("read", READS)
def test_reading_gives_ordinary_tensors(cache: PagedCache, read: str) -> None:
    """What cannot be written to must not get in the way of those that read."""
    keys = cache.layers[1].keys
    plain = torch.from_numpy(np.array(keys.tolist(), np.float32))
    found, expected = READS[read](keys), READS[read](plain)
    assert type(found) is torch.Tensor
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.detach(), expected.detach())


def test_a_read_tensor_is_saved_printed_and_converted_as_its_contents(cache: PagedCache) -> None:
    """Tensors of a subclass are refused by numpy(), and are saved with the name of their class."""
    keys, file = cache.layers[1].keys, io.BytesIO()
    plain = keys.clone()
    torch.save({"keys": keys, "part": keys[0]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["keys"]) is torch.Tensor
    assert torch.equal(loaded["keys"], plain)
    assert torch.equal(loaded["part"], plain[0])
    assert np.array_equal(keys.numpy(), plain.numpy())
    assert np.array_equal(np.asarray(keys[0]), plain[0].numpy())
    assert keys.tolist() == plain.tolist()
    assert repr(keys) == repr(plain)
    assert keys[0, 0, 0, 0].item() == plain[0, 0, 0, 0].item()
    with pytest.raises(ValueError, match="read-only"):
        keys.numpy()[:] = 0


# edit()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
@pytest.mark.parametrize("attention", ["hf_paged", "eager"])
def test_edits_do_what_they_do_to_a_dynamic_cache(
    tiny_model: Build, name: str, attention: str
) -> None:
    """Of all layers, also those with windows and chunks: what follows is computed from them."""
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    dynamic = prefilled(model, DynamicCache(config=model.config))
    paged = prefilled(model, PagedCache(config=model.config, block_size=4))
    untouched = prefilled(model, PagedCache(config=model.config))
    for index, layer in enumerate(dynamic.layers):
        with paged.edit(index) as (keys, values):
            assert torch.equal(keys, paged.layers[index].keys)
            assert type(keys) is type(values) is torch.Tensor
            for states in (keys, layer.keys):
                states[:, :, -5:-2] *= 1.5
            for states in (values, layer.values):
                states[:, 1, -1] += 0.25
    inputs = ragged_ids(LENGTHS)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    step = {"input_ids": inputs["input_ids"][:, -3:], "attention_mask": mask}
    with torch.no_grad():
        expected, found, other = (
            model(**step, past_key_values=cache).logits for cache in (dynamic, paged, untouched)
        )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - other).abs().max() > 1e-2
    paged.pool.check()


def test_assignment_reaches_the_blocks(cache: PagedCache) -> None:
    """`layer.keys = tensor` was an AttributeError that named nothing."""
    keys, values = (states.clone() for states in (cache.layers[1].keys, cache.layers[1].values))
    cache.layers[1].keys = keys * 2
    cache.layers[1].values = cache.layers[1].values * 3
    assert torch.equal(cache.layers[1].keys, keys * 2)
    assert torch.equal(cache.layers[1].values, values * 3)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 2, 12, 16),
        torch.zeros(1, 2, 13, 16),
        torch.zeros(2, 2, 13, 16, dtype=torch.float16),
        torch.zeros(()),
        None,
        0.0,
    ],
    ids=["fewer tokens", "fewer rows", "another dtype", "a number", "None", "a float"],
)
def test_assignment_of_something_else_is_refused(cache: PagedCache, value: Any) -> None:
    before = contents(cache)
    with pytest.raises(ValueError, match=r"keep their shape .* cache\.edit\(layer\)"):
        cache.layers[1].keys = value
    assert unchanged(cache, before)


def test_forks_rows_and_prefixes_that_share_blocks_stay_as_they_are(model: PreTrainedModel) -> None:
    """An edit of one holder's K/V must not be seen by the others."""
    pool = BlockPool(model.config, block_size=4)
    ids = ragged_ids([11])["input_ids"]
    cache = prefilled(model, PagedCache(pool=pool), [11])
    pool.insert_prefix(cache, ids)
    cache.batch_repeat_interleave(3)
    fork = cache.fork()
    before = contents(cache)
    with cache.edit(2) as (keys, values):
        keys[1, :, 5] = 7
        values[1, :, 9] = 8
    pool.check()
    assert unchanged(fork, before)
    for layer, old in ((0, before[0]), (2, before[4])):
        same = (cache.layers[layer].keys == old).all(-1).all(1)
        same[1, 5] ^= layer == 2
        assert same.all()
    assert (cache.layers[2].keys[1, :, 5] == 7).all()
    assert (cache.layers[2].values[1, :, 9] == 8).all()
    with pool.match_prefix(torch.cat([ids, ids[:, :1]], 1)) as known:
        assert known.get_seq_length() == 11
        for layer in range(4):
            assert torch.equal(known.layers[layer].keys[0], before[2 * layer][0])
    # Only what was written to was copied: two blocks of one row.
    assert [a != b for a, b in zip(*cache.block_tables[:2], strict=True)] == [False, True, True]
    assert cache.block_tables[0] == cache.block_tables[2] == fork.block_tables[1]


def test_rows_that_are_edited_alike_part_only_as_far_as_they_must(model: PreTrainedModel) -> None:
    """The last holder of a block writes to the original."""
    cache = prefilled(model, PagedCache(config=model.config, block_size=4, num_blocks=4), [12])
    cache.batch_repeat_interleave(2)
    with cache.edit(0) as (keys, _):
        keys[0, :, 0], keys[1, :, 0] = 1, 2
    assert cache.pool.num_free == 0
    assert [float(keys[0, 0, 0]) for keys in cache.layers[0].keys] == [1, 2]
    cache.pool.check()


def test_a_full_pool_refuses_an_edit_and_nothing_is_written(model: PreTrainedModel) -> None:
    cache = prefilled(model, PagedCache(config=model.config, block_size=4, num_blocks=4), [12])
    fork, before = cache.fork(), contents(cache)
    with pytest.raises(PoolExhausted), cache.edit(0) as (keys, _):
        keys.zero_()
    assert unchanged(cache, before)
    assert unchanged(fork, before)
    with cache.edit(0) as (keys, _):
        keys[:, :, 2] = 0  # one block can be copied
    assert unchanged(fork, before)
    cache.pool.check()


def test_a_body_that_raises_writes_nothing(cache: PagedCache) -> None:
    before = contents(cache)
    with pytest.raises(KeyboardInterrupt), cache.edit(0) as (keys, _):
        interrupt(keys.zero_())
    assert unchanged(cache, before)


def test_edited_tokens_are_not_indexed(model: PreTrainedModel) -> None:
    """A later prompt would be given K/V that its model would not compute."""
    pool = BlockPool(model.config, block_size=4)
    ids = ragged_ids([13])["input_ids"]
    prompt = torch.cat([ids, ids], 1)
    for edited, known in ((None, 13), (9, 8), (3, 0)):
        cache = prefilled(model, PagedCache(pool=pool), [13])
        if edited is not None:
            with cache.edit(1) as (_, values):
                values[:, :, edited] += 1
        with torch.no_grad():
            model(prompt[:, 13:20], past_key_values=cache)
        assert pool.insert_prefix(cache, prompt[:, :20]) == (20 if edited is None else known)
        pool.clear_prefixes()
        if edited is not None:
            again = cache.fork()
            again.crop(-20 + edited)
            assert pool.insert_prefix(again, prompt[:, :edited]) == edited
            pool.clear_prefixes()


def test_an_edit_that_changes_nothing_does_nothing(model: PreTrainedModel) -> None:
    pool = BlockPool(model.config, block_size=4)
    cache = prefilled(model, PagedCache(pool=pool), [13])
    fork = cache.fork()
    with cache.edit(1) as (keys, _):
        keys *= 1
    assert cache.block_tables == fork.block_tables
    assert pool.insert_prefix(cache, ragged_ids([13])["input_ids"]) == 13


def test_no_gradient_gets_into_the_blocks(model: PreTrainedModel, cache: PagedCache) -> None:
    """A steering vector that is trained made the pool's memory part of its graph."""
    vector = torch.ones(16, requires_grad=True)
    with cache.edit(0) as (keys, values):
        keys.view(-1, 16).add_(vector)
        values[:, :, 8:] = vector
    cache.layers[1].keys = cache.layers[1].keys * vector
    for storage in cache.pool.groups[0].storage.values():
        for memory in (storage.padded_keys, storage.key_slots, storage.value_slots):
            assert not memory.requires_grad
    model(torch.tensor([[5], [6]]), past_key_values=cache)


def test_padding_is_passed_over(cache: PagedCache) -> None:
    """A whole tensor may be shifted; where no token is stored there is nothing to change."""
    before = contents(cache)
    with cache.edit(0) as (keys, values):
        keys += 1
        values[1, :, :7] = 5
    is_token = ragged_ids(LENGTHS)["attention_mask"][:, None, :, None]
    assert torch.equal(cache.layers[0].keys, (before[0] + 1) * is_token)
    assert torch.equal(cache.layers[0].values, before[1])


def test_rows_with_holes_and_freed_rows(model: PreTrainedModel) -> None:
    """Columns of padding between tokens must not shift what is written behind them."""
    cache = PagedCache(config=model.config, block_size=4)
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 3:6], mask[1, 8:] = 0, 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    cache.free_rows(torch.tensor([1]))
    before = contents(cache)
    with cache.edit(3) as (keys, values):
        keys[:, :, 7:9], values[:, :, 7] = 1, 2
    expected = before[6].clone()
    expected[0, :, 7:9] = 1
    assert torch.equal(cache.layers[3].keys, expected)
    assert [bool((cache.layers[3].values[row, :, 7] == 2).all()) for row in (0, 1)] == [True, False]
    cache.pool.check()


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_only_edited_tokens_are_rounded_again(
    model: PreTrainedModel, kv_dtype: torch.dtype
) -> None:
    """In storage of lower precision what was not edited keeps its bits."""
    pool = BlockPool(model.config, block_size=4, kv_dtype=kv_dtype)
    cache = prefilled(model, PagedCache(pool=pool))
    before = contents(cache)
    assert {states.dtype for states in before} == {torch.float32}
    with cache.edit(0) as (keys, _):
        keys[0, :, 4] = 1000.3
    after = contents(cache)
    rounded = torch.tensor(1000.3).clamp(max=torch.finfo(kv_dtype).max).to(kv_dtype).float()
    before[0][0, :, 4] = rounded
    assert all(map(torch.equal, after, before))


def test_k_v_of_another_shape_or_dtype_are_not_written(cache: PagedCache) -> None:
    before = contents(cache)
    for spoil in (
        lambda keys: keys.resize_(2, 2, 12, 16),
        lambda keys: setattr(keys, "data", keys.double()),
    ):
        edit = cache.edit(0)
        keys, values = edit.__enter__()
        values.zero_()
        spoil(keys)
        with pytest.raises(ValueError, match="leaves shape, dtype and device as they are"):
            edit.__exit__(None, None, None)
    assert unchanged(cache, before)


MEANWHILE: dict[str, Callable[[PreTrainedModel, PagedCache], Any]] = {
    "forward": lambda model, cache: model(torch.tensor([[5], [6]]), past_key_values=cache),
    "crop": lambda model, cache: cache.crop(-1),
    "reorder": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "reset": lambda model, cache: cache.reset(),
}


@pytest.mark.parametrize("name", MEANWHILE)
def test_an_edit_of_other_tokens_than_it_began_with_is_refused(
    model: PreTrainedModel, cache: PagedCache, name: str
) -> None:
    """Its tensors would go to other tokens' slots."""
    expected = cache.fork()
    edit = cache.edit(0)
    with torch.no_grad():
        keys, _ = edit.__enter__()
        keys += 1
        for each in (cache, expected):
            MEANWHILE[name](model, each)
        with pytest.raises(RuntimeError, match=r"tokens since edit\(\) began, so nothing was"):
            edit.__exit__(None, None, None)
    if name != "reset":
        assert unchanged(cache, contents(expected))


def test_edits_of_two_layers_may_be_nested_and_forked_in(cache: PagedCache) -> None:
    before = contents(cache)
    with cache.edit(0) as (keys, _), cache.edit(1) as (_, values):
        fork = cache.fork()
        keys[0], values[0] = 1, 2
    assert unchanged(fork, before)
    assert (cache.layers[0].keys[0] == 1).all()
    assert (cache.layers[1].values[0] == 2).all()


def test_what_cannot_be_edited(model: PreTrainedModel, cache: PagedCache) -> None:
    """Layers that there are not or that are empty, and caches that hold nothing any more."""
    for layer in (4, -1, "0", None):
        with pytest.raises(ValueError, match="keeps no K/V in blocks"), cache.edit(layer):
            pass
    with (
        pytest.raises(RuntimeError, match="has had no K/V yet"),
        PagedCache(config=model.config).edit(0),
    ):
        pass
    cache.offload()
    with pytest.raises(RuntimeError, match=r"restore\(\) it first"), cache.edit(0):
        pass
    cache.restore()
    cache.free()
    with pytest.raises(RuntimeError, match="was freed"), cache.edit(0):
        pass


def test_an_edit_outlives_moving_out_and_saving(
    model: PreTrainedModel, cache: PagedCache, tmp_path: Any
) -> None:
    with cache.edit(2) as (keys, _):
        keys[:, :, 10] = 3
    before = contents(cache)
    cache.offload()
    cache.restore()
    assert unchanged(cache, before)
    cache.save(tmp_path / "cache")
    loaded = PagedCache.load(tmp_path / "cache", model.config)
    assert unchanged(loaded, before)
    sequences = ragged_ids(LENGTHS)["input_ids"]
    assert loaded.pool.insert_prefix(loaded, sequences) == 8
