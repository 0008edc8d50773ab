"""Beam search under many settings: sequences and scores are those of a DynamicCache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TINY, ragged_ids
from test_generate import OnlyEven
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessorList,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_paged import PagedCache

Build = Callable[[str], PreTrainedModel]
SETTINGS: dict[str, dict[str, Any]] = {
    "length penalty": {"num_beams": 4, "length_penalty": 2.0},
    "negative length penalty": {"num_beams": 3, "length_penalty": -1.0},
    "early stopping": {"num_beams": 4, "early_stopping": True},
    "never stopping early": {"num_beams": 4, "early_stopping": "never"},
    "sampling": {"num_beams": 3, "do_sample": True, "top_k": 20},
    "constraint": {"num_beams": 4, "logits_processor": LogitsProcessorList([OnlyEven()])},
    "fewer returned than beams": {"num_beams": 5, "num_return_sequences": 3},
    "repetition": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.5},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", TINY)
def test_sequences_and_scores(tiny_model: Build, name: str, setting: str) -> None:
    model = tiny_model(name)
    outs = []
    for attention, cache in (
        ("eager", DynamicCache(config=model.config)),
        ("hf_paged", PagedCache(config=model.config, block_size=4)),
    ):
        model.set_attn_implementation(attention)
        torch.manual_seed(0)
        outs.append(
            model.generate(
                **ragged_ids([17, 4, 11]),
                past_key_values=cache,
                max_new_tokens=10,
                eos_token_id=[7, 12, 30],  # so that beams do end
                return_dict_in_generate=True,
                output_scores=True,
                **{"do_sample": False, **SETTINGS[setting]},
            )
        )
    expected, found = outs
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(
        found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4
    )
    cache.pool.check()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_encoder_decoder_rows_with_different_inputs_part(num_beams: int) -> None:
    """All rows start with one token; from the first cross-attention on their K/V differ."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    inputs = ragged_ids([12, 5, 9])
    outs = []
    for attention, cache in (
        ("eager", DynamicCache(config=config)),
        ("hf_paged", PagedCache(config=config, block_size=4)),
    ):
        model.set_attn_implementation(attention)
        both = EncoderDecoderCache(cache, DynamicCache(config=config))
        outs.append(
            model.generate(
                **inputs,
                past_key_values=both,
                num_beams=num_beams,
                max_new_tokens=12,
                decoder_start_token_id=0,
                eos_token_id=None,
                do_sample=False,
            )
        )
    assert torch.equal(*outs)
    assert len({tuple(row.tolist()) for row in outs[0]}) > 1
    assert len({table[0] for table in cache.block_tables}) >= 3
    cache.pool.check()
