"""What a caller keeps between calls: it is right for the next one, or says that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ragged_ids, tiny
from test_snapshot import tampered
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_paged import BlockPool, FreeFinishedRows, PagedCache, encoder_decoder_cache


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    return model


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any, **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": 8, "pad_token_id": 0, **kwargs}
    return model.generate(**inputs, past_key_values=cache, **kwargs)


def alone(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    return generate(model, inputs, DynamicCache(config=model.config), **kwargs)


@pytest.mark.parametrize("lengths", [[18, 18, 18], [18, 9, 5]])
def test_a_stopping_criterion_knows_nothing_of_the_last_generate(
    model: Any, lengths: list[int]
) -> None:
    """Prompts as long as the last output had their rows cut short where the last ones had ended."""
    inputs, others = ragged_ids([10, 10, 7]), ragged_ids(lengths, seed=1)
    first = alone(model, inputs)
    ends = {"eos_token_id": [int(first[0, 12]), int(first[1, 14])]}
    cache = PagedCache(config=model.config, block_size=4)
    stop = [FreeFinishedRows(cache, ends["eos_token_id"])]
    for batch in (inputs, others):
        cache.reset()
        found = generate(model, batch, cache, stopping_criteria=stop, **ends)
        assert torch.equal(found, alone(model, batch, **ends))


@pytest.mark.parametrize("lengths", [[10, 10], [17, 17], [10]])
def test_a_stopping_criterion_refuses_another_cache(model: Any, lengths: list[int]) -> None:
    """It would free rows of the cache that it was made for."""
    inputs, others = ragged_ids([10, 10]), ragged_ids(lengths, seed=1)
    end = int(alone(model, inputs)[0, 12])
    cache = PagedCache(config=model.config)
    stop = [FreeFinishedRows(cache, end)]
    generate(model, inputs, cache, stopping_criteria=stop)
    held = cache.row_lengths
    with pytest.raises(ValueError, match="make one for each cache"):
        generate(model, others, PagedCache(config=model.config), stopping_criteria=stop)
    assert cache.row_lengths == held


@pytest.mark.parametrize("num_beams", [2, 3])
def test_a_stopping_criterion_refuses_beams(model: Any, num_beams: int) -> None:
    """It freed rows that other beams came from, or rows that there were not."""
    inputs = ragged_ids([10, 10, 7])
    end = int(alone(model, inputs, num_beams=num_beams)[0, 11])
    cache = PagedCache(config=model.config)
    stop = [FreeFinishedRows(cache, end)]
    with pytest.raises(ValueError, match="as beam search does"):
        generate(model, inputs, cache, num_beams=num_beams, stopping_criteria=stop)
    assert not cache.freed_rows.any()


def test_a_stopping_criterion_takes_the_cache_of_an_encoder_decoder_model() -> None:
    """It was made for such a cache without a word, and failed where the first row ended."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.set_attn_implementation("hf_paged")
    inputs, kwargs = ragged_ids([12, 5, 9]), {"decoder_start_token_id": 0, "eos_token_id": None}

    def plain() -> EncoderDecoderCache:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    kwargs["eos_token_id"] = int(generate(model, inputs, plain(), **kwargs)[1, 3])
    cache = encoder_decoder_cache(config, block_size=4)
    stop = [FreeFinishedRows(cache, kwargs["eos_token_id"])]
    found = generate(model, inputs, cache, stopping_criteria=stop, **kwargs)
    assert torch.equal(found, generate(model, inputs, plain(), **kwargs))
    assert cache.self_attention_cache.freed_rows[1]
    with pytest.raises(ValueError, match="not DynamicCache"):
        FreeFinishedRows(plain(), 1)


def test_a_cache_of_another_prompt_is_neither_filled_nor_indexed(model: Any) -> None:
    """What it holds was passed over as if it were of these prompts, and indexed as theirs."""
    pool = BlockPool(model, block_size=4)
    inputs, others = ragged_ids([12, 9]), ragged_ids([20, 20], seed=1)
    ids, mask = inputs.values()
    words = r"begun with other tokens than those of rows \[0, 1\]"
    filled = PagedCache(pool=pool).prefill(model, ids, mask)
    assert pool.insert_prefix(filled, ids, attention_mask=mask) == 11 + 8
    matched = pool.match_prefix(ids, mask)
    moved, cut = filled.fork(2), filled.fork()
    moved.batch_select_indices([0, 3])
    moved.reorder_cache([1, 0])
    cut.crop(-4)
    for cache in (filled, matched, moved, cut):
        held = cache.row_lengths
        with pytest.raises(ValueError, match=words):
            cache.prefill(model, **others)
        assert cache.row_lengths == held
        out = generate(model, others, cache)  # as of a DynamicCache, this cannot be told
        with pytest.raises(ValueError, match=words):
            pool.insert_prefix(cache, out)
    one = PagedCache(pool=pool).prefill(model, ids[:1])
    with pytest.raises(ValueError, match=words):
        one.prefill(model, **others)
    for cache in (filled, one):
        cache.reset()
        out = generate(model, others, cache.prefill(model, **others))
        assert torch.equal(out, alone(model, others))
    cut.crop(-cut.get_seq_length())
    three = ragged_ids([5, 5, 5])["input_ids"]
    cut.prefill(model, three).batch_select_indices([2])
    assert pool.insert_prefix(cut, three[2:]) == 4


def test_freed_rows_are_saved(model: Any, tmp_path: Path) -> None:
    """A loaded cache took the next tokens of rows that had none in front of them any more."""
    cache = PagedCache(config=model.config)
    ids = ragged_ids([9, 9])["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.free_rows(torch.tensor([1]))
        cache.save(tmp_path / "cache")
        loaded = PagedCache.load(tmp_path / "cache", model.config)
        with pytest.raises(RuntimeError, match="Rows of this cache have been freed"):
            model(ids, past_key_values=loaded)
    assert loaded.freed_rows.tolist() == [False, True]
    for change in (torch.Tensor.logical_not, torch.Tensor.int, lambda rows: rows[None]):
        path = tampered(
            tmp_path / "cache",
            tmp_path / "forged",
            lambda tensors, _, f=change: tensors.update(freed_rows=f(tensors["freed_rows"])),
        )
        with pytest.raises(ValueError, match="its rows are not those of a cache"):
            PagedCache.load(path, model.config)
