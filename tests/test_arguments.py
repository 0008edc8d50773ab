"""What callers pass: near enough is taken, anything else is refused in a sentence that helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ragged_ids, tiny
from transformers import BatchEncoding, DynamicCache

from hf_paged import BlockPool, FreeFinishedRows, PagedCache, encoder_decoder_cache

INPUTS = ragged_ids([9, 6])
IDS, MASK = INPUTS.values()


@pytest.fixture(scope="module")
def model() -> Any:
    return paged("llama")


def paged(name: str, **overrides: Any) -> Any:
    model = tiny(name, **overrides)
    model.set_attn_implementation("hf_paged")
    return model


def filled(model: Any, **kwargs: Any) -> PagedCache:
    cache = PagedCache(**(kwargs or {"config": model.config}))
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


# Tokens, masks and rows

NEAR: dict[str, Callable[[torch.Tensor], Any]] = {
    "lists": torch.Tensor.tolist,
    "tuples": lambda tensor: tuple(map(tuple, tensor.tolist())),
    "an array": torch.Tensor.numpy,
    "a list of tensors": list,
}


@pytest.mark.parametrize("kind", NEAR)
def test_tokens_and_masks_as_lists_and_arrays(model: Any, kind: str) -> None:
    """They ended in AttributeErrors, such as that a list has no attribute 'ndim'."""
    ids, mask = (NEAR[kind](tensor) for tensor in (IDS, MASK))
    cache = PagedCache(pool=BlockPool(model, block_size=4))
    cache.prefill(model, ids, mask)
    assert cache.row_lengths == [8, 5]
    assert cache.pool.insert_prefix(cache, ids, attention_mask=mask) == 13
    assert cache.pool.match_prefix(ids, mask).row_lengths == [8, 5]


def test_what_a_tokenizer_returns_without_tensors(model: Any) -> None:
    """All of it is lists, also what the model takes besides tokens and mask."""
    inputs = {name: tensor.tolist() for name, tensor in INPUTS.items()}
    cache = PagedCache(config=model.config)
    cache.prefill(model, **inputs, token_type_ids=inputs["attention_mask"], chunk_size=3)
    assert cache.row_lengths == [8, 5]


def test_what_generate_returns_is_indexed_whole(model: Any) -> None:
    """With return_dict_in_generate that is no tensor, but has the sequences in it."""
    pool = BlockPool(model, block_size=4)
    with PagedCache(pool=pool) as cache:
        out = model.generate(
            **INPUTS, past_key_values=cache, max_new_tokens=4, return_dict_in_generate=True
        )
        assert pool.insert_prefix(cache, out) == 9 + 6 + 2 * 3


WRONG: dict[str, tuple[Any, str]] = {
    "a BatchEncoding": (BatchEncoding(dict(INPUTS)), r"not a BatchEncoding; .* as \*\*inputs\.$"),
    "a dict": (INPUTS, r"not a dict; .* as \*\*inputs\.$"),
    "one row": (IDS[0], r"not torch.int64 of shape \(9,\)"),
    "lists of two lengths": ([[1, 2], [3]], r"lists of one length, not \[\[1, 2\], \[3\]\]"),
    "floats": (IDS.float(), "not torch.float32"),
    "bools": (IDS.bool(), "not torch.bool"),
    "texts": (["hello", "world"], "not .'hello', 'world'.*"),
    "nothing": (None, "not None"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_other_things_than_token_ids(model: Any, kind: str) -> None:
    """They ended in AttributeErrors; bools were taken for the tokens 0 and 1."""
    wrong, words = WRONG[kind]
    cache = filled(model)
    for call in (
        lambda: cache.pool.match_prefix(wrong),
        lambda: cache.pool.insert_prefix(cache, wrong),
        lambda: PagedCache(config=model.config).prefill(model, wrong),
    ):
        with pytest.raises(ValueError, match=f"must be whole numbers .*{words}"):
            call()


@pytest.mark.parametrize("mask", [MASK[:, :5], MASK[0], MASK[:, None, None], INPUTS, "ones"])
def test_other_things_than_masks(model: Any, mask: Any) -> None:
    cache = PagedCache(config=model.config)
    with pytest.raises(ValueError, match="attention_mask must"):
        cache.prefill(model, IDS, mask)
    assert cache.get_seq_length() == 0


def test_a_slice_of_the_rows(model: Any) -> None:
    """DynamicCache takes it; here an error of torch said that it could not infer its dtype."""
    cache = filled(model)
    _, wanted = cache.block_tables
    cache.batch_select_indices(slice(1, 2))
    assert cache.block_tables == [wanted]


@pytest.mark.parametrize(
    "rows", [[2], [-3], torch.tensor([0.0]), torch.tensor([True]), None, "a", [[0, 1]]]
)
def test_rows_that_there_are_not(model: Any, rows: Any) -> None:
    """Floats were cut to whole numbers and a short mask filled up, and None chose every row; beams
    that do not exist left the cache as if its rows had moved."""
    cache = filled(model, pool=BlockPool(model))
    for name in ("batch_select_indices", "reorder_cache", "free_rows"):
        with pytest.raises(IndexError, match="Rows are chosen by numbers below 2 or by a bool"):
            getattr(cache, name)(rows)
    assert cache.row_lengths == [9, 9]
    assert cache.pool.insert_prefix(cache, IDS) == 18


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None, True])
def test_counts_that_are_none(model: Any, count: Any) -> None:
    cache = filled(model)
    with pytest.raises(ValueError, match="repeats must be a whole number"):
        cache.batch_repeat_interleave(count)
    with pytest.raises(ValueError, match="n must be a whole number"):
        cache.fork(count)
    assert cache.row_lengths == [9, 9]


@pytest.mark.parametrize("count", [-2.5, "-1", None, torch.tensor([-1, -2])])
def test_crop_takes_whole_numbers(model: Any, count: Any) -> None:
    cache = filled(model)
    with pytest.raises(ValueError, match="crop takes minus the number of tokens"):
        cache.crop(count)
    assert cache.get_seq_length() == 9


# Objects


def test_a_pool_in_the_place_of_a_config(model: Any) -> None:
    """A pool has a config, so that the cache quietly made another pool for it."""
    for wrong in (BlockPool(model), torch.nn.Linear(1, 1), "gpt2"):
        with pytest.raises(ValueError, match="config must be a model's PreTrainedConfig or the m"):
            PagedCache(wrong)
    both = encoder_decoder_cache(model)
    assert both.self_attention_cache.pool.identity() == BlockPool(model).identity()


def test_other_things_than_models_and_caches(model: Any) -> None:
    cache = filled(model)
    for wrong in (DynamicCache(config=model.config), model.config, None):
        with pytest.raises(ValueError, match="cache must be the PagedCache"):
            cache.pool.insert_prefix(wrong, IDS)
        with pytest.raises(ValueError, match="cache must be the PagedCache"):
            FreeFinishedRows(wrong, 1)
    for wrong in (model.config, torch.nn.Linear(1, 1), IDS):
        with pytest.raises(ValueError, match="model must be a transformers model"):
            cache.prefill(wrong, IDS)


@pytest.mark.parametrize("ends", [None, "</s>", [], [1.5], [[1]]])
def test_a_row_ends_at_tokens(model: Any, ends: Any) -> None:
    """With none at all no row ever ended."""
    with pytest.raises(ValueError, match=r"eos_token_id must be whole numbers \[tokens\]"):
        FreeFinishedRows(PagedCache(config=model.config), ends)


def test_lists_of_prompts(model: Any) -> None:
    pool = BlockPool(model)
    with pytest.raises(ValueError, match="pass its input_ids, without padding"):
        pool.batches(BatchEncoding(dict(INPUTS)), 4)
    with pytest.raises(ValueError, match="pad_token_id must be whole numbers"):
        pool.batches([[1, 2]], 4, pad_token_id=None)
    with pytest.raises(ValueError, match=r"Prompt 1 must be whole numbers .*\[\[1\], \[2, 3\]\]"):
        pool.batches([[1, 2], [[1], [2, 3]]], 4)


def test_files_are_not_blamed_for_other_faults(model: Any, tmp_path: Path) -> None:
    """A wrong config, or a path that is none, was called a damaged file."""
    filled(model).save(bytes(tmp_path / "cache"))
    assert PagedCache.load(bytes(tmp_path / "cache"), model.config).row_lengths == [9, 9]
    for wrong in (None, "gpt2", BlockPool(model)):
        with pytest.raises(ValueError, match=r"^config must be"):
            PagedCache.load(tmp_path / "cache", wrong)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        PagedCache.load(tmp_path, model.config)
    with pytest.raises(TypeError, match="not NoneType"):
        PagedCache.load(None, model.config)


def test_nothing_is_moved_to_where_there_is_no_data(model: Any) -> None:
    cache = filled(model)
    with pytest.raises(ValueError, match="meta device"):
        cache.offload("meta")
    assert cache.row_lengths == [9, 9]


# Errors that say what to do


def test_beams_on_a_prefilled_batch(model: Any) -> None:
    """The error did not say what would do, as it does now; so it is done."""
    inputs = ragged_ids([9, 6, 8])
    expected = model.generate(**inputs, num_beams=3, max_new_tokens=5)
    cache = PagedCache(config=model.config).prefill(model, **inputs)
    for ids, mask in (inputs.values(), (inputs["input_ids"], None)):
        with pytest.raises(ValueError, match=r"call batch_repeat_interleave\(3\) first"):
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, num_beams=3, max_new_tokens=5
            )
    cache.batch_repeat_interleave(3)
    found = model.generate(**inputs, past_key_values=cache, num_beams=3, max_new_tokens=5)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="any other must get the rows that it holds"):
        model(IDS, past_key_values=cache)


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 20}, {"max_memory": "80KiB"}])
def test_a_pool_without_a_block_in_use_takes_k_v_of_another_kind(
    model: Any, sizes: dict[str, Any]
) -> None:
    """After reset() the dtype of the last K/V was asked for, though none were there any more."""
    half = paged("llama").to(torch.bfloat16)
    cache = PagedCache(config=model.config, **sizes)
    blocks = []
    for each, other in ((model, half), (half, model), (model, half)):
        expected, found = (
            each.generate(IDS, past_key_values=one, max_new_tokens=4)
            for one in (PagedCache(config=model.config), cache)
        )
        assert torch.equal(found, expected)
        blocks.append(cache.pool.num_blocks)
        fork = cache.fork()
        cache.reset()
        with pytest.raises(ValueError, match="use one dtype for all calls"), torch.no_grad():
            other(IDS, past_key_values=cache)
        fork.free()
        cache.pool.check()
    if "max_memory" in sizes:
        assert blocks == [5, 10, 5]


def test_a_pool_that_knows_a_prefix_keeps_its_kind(model: Any) -> None:
    cache = filled(model, pool=BlockPool(model))
    pool = cache.pool
    pool.insert_prefix(cache, IDS)
    cache.free()
    heads = paged("llama", num_key_value_heads=4)
    with pytest.raises(ValueError, match="a pool made for this model's config"), torch.no_grad():
        heads(IDS, past_key_values=PagedCache(pool=pool))
    pool.clear_prefixes()
    with torch.no_grad():
        found = heads(IDS, past_key_values=PagedCache(pool=pool)).logits
        assert torch.allclose(found, heads(IDS).logits, atol=1e-5)


def test_a_mask_of_ones_own_is_not_taken_for_another_attention(model: Any) -> None:
    """The error advised to use hf_paged, which was in use."""
    pool = BlockPool(model)
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(IDS, attention_mask=torch.zeros(2, 1, 9, 9), past_key_values=cache)
        with pytest.raises(ValueError, match="or was given a 4-D mask or a dict of them"):
            pool.insert_prefix(cache, IDS)
