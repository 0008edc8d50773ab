"""An unmodified generate gives on a PagedCache what it gives on a DynamicCache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TextStreamer,
)

from hf_paged import PagedCache

TOLERANCE = 1e-4


class OnlyEven(LogitsProcessor):
    """Allows tokens of even number only, so that the choice visibly went through it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 1::2] = -torch.inf
        return scores


class Collect(TextStreamer):
    """A streamer that keeps the ids that it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        pass


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 20},  # rows cross block borders at different steps
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4},
    "beams, several returned": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "chunked prefill": {"prefill_chunk_size": 7},
    "logits processor": {"logits_processor": LogitsProcessorList([OnlyEven()])},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


def run(model: PreTrainedModel, cache: Any, seed: int = 0, **kwargs: Any) -> Any:
    attention = "hf_paged" if isinstance(cache, PagedCache) else "sdpa"
    model.set_attn_implementation(attention)
    torch.manual_seed(seed)
    defaults = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    return model.generate(
        past_key_values=cache, return_dict_in_generate=True, **{**defaults, **kwargs}
    )


def both(
    model: PreTrainedModel, look: Callable[[PagedCache], None] | None = None, **kwargs: Any
) -> None:
    """Generate on both caches and compare tokens and logits; `look` sees the paged cache.

    After it the pool's invariants hold, and once the cache is gone its blocks are back.
    """
    expected = run(model, DynamicCache(config=model.config), **copy.deepcopy(kwargs))
    cache = PagedCache(config=model.config)
    found = run(model, cache, **kwargs)
    torch.testing.assert_close(found.sequences, expected.sequences)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    pool = cache.pool
    pool.check()
    assert pool.num_used > 0
    assert cache.get_seq_length() == cache.layers[-1].keys.shape[2]
    assert cache.report().dense_calls == {}
    if look is not None:
        look(cache)
    del cache, found
    assert pool.num_used == 0


@pytest.fixture(scope="module")
def prompts(real: Any, text: str) -> dict[str, torch.Tensor]:
    """Eight prompts of 5 to 256 tokens, padded on the left."""
    _, tokenizer = real
    ids = tokenizer(text[:20000]).input_ids
    lengths = [5, 256, 31, 17, 64, 16, 128, 48]
    pieces = [ids[100 * i : 100 * i + n] for i, n in enumerate(lengths)]
    return tokenizer.pad({"input_ids": pieces}, return_tensors="pt")


@pytest.mark.parametrize("name", CASES)
def test_ragged_batch_equals_dynamic_cache(real: Any, prompts: Any, name: str) -> None:
    model, _ = real
    if name != "greedy":  # which has all eight
        prompts = {key: value[::3, -64:] for key, value in prompts.items()}
    rows = len(prompts["input_ids"]) * max(
        CASES[name].get("num_beams", 1), CASES[name].get("num_return_sequences", 1)
    )
    padding = prompts["attention_mask"].shape[1] - prompts["attention_mask"].sum(1)

    def padding_is_not_stored(cache: PagedCache) -> None:
        repeated = padding.repeat_interleave(rows // len(padding))
        assert cache.row_lengths == (cache.get_seq_length() - repeated).tolist()

    both(model, padding_is_not_stored, **prompts, **CASES[name])


@pytest.mark.parametrize("tokens", [1, 40])
def test_prompt_lookup(real: Any, text: str, tokens: int) -> None:
    model, tokenizer = real
    ids = tokenizer(text[:2000], return_tensors="pt").input_ids[:, :tokens]
    ids = torch.cat([ids, ids], dim=1)  # so that there is something to look up
    both(model, input_ids=ids, prompt_lookup_num_tokens=4, max_new_tokens=24)


@pytest.mark.parametrize("layers", [30, 26], ids=["all accepted", "some accepted"])
def test_assisted_decoding(real: Any, text: str, layers: int) -> None:
    model, tokenizer = real
    assistant = copy.deepcopy(model)
    assistant.model.layers = assistant.model.layers[:layers]
    assistant.config.num_hidden_layers = layers
    assistant.config.layer_types = None
    ids = tokenizer(text[300:700], return_tensors="pt").input_ids
    both(model, input_ids=ids, assistant_model=assistant, max_new_tokens=20)


def test_streamer(real: Any) -> None:
    model, tokenizer = real
    streamer = Collect()
    inputs = tokenizer(["The capital of France is"], return_tensors="pt")
    out = run(model, PagedCache(config=model.config), **inputs, streamer=streamer)
    expected = run(model, DynamicCache(config=model.config), **inputs)
    assert streamer.ids == out.sequences[0].tolist() == expected.sequences[0].tolist()


def test_inputs_embeds(real: Any, prompts: Any) -> None:
    model, _ = real
    ids, mask = (prompts[key][::3, -64:] for key in ("input_ids", "attention_mask"))
    embeds = model.get_input_embeddings()(ids).detach()
    both(model, inputs_embeds=embeds, attention_mask=mask)


def test_conversation_continues_on_the_same_cache(real: Any, prompts: Any) -> None:
    model, tokenizer = real
    caches = [PagedCache(config=model.config), DynamicCache(config=model.config)]
    questions = tokenizer([" And then?", " Why is that so?"], return_tensors="pt", padding=True)
    outs = []
    for cache in caches:
        inputs = {key: value[2:4] for key, value in prompts.items()}
        for _ in range(3):
            out = run(model, cache, **inputs, max_new_tokens=6)
            grown = out.sequences.shape[1] - inputs["attention_mask"].shape[1]
            answered = torch.nn.functional.pad(inputs["attention_mask"], (0, grown), value=1)
            # The second turns differ in length, so that padding lies between tokens.
            inputs = {
                "input_ids": torch.cat([out.sequences, questions["input_ids"]], dim=1),
                "attention_mask": torch.cat([answered, questions["attention_mask"]], dim=1),
            }
        outs.append(out)
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for mine, theirs in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    assert caches[0].report().dense_calls == {}


def test_batch_equals_solo_runs(real: Any, prompts: Any) -> None:
    model, _ = real
    batch = run(model, PagedCache(config=model.config), **prompts)
    for row, mask in enumerate(prompts["attention_mask"]):
        ids = prompts["input_ids"][row, mask.bool()][None]
        solo = run(model, PagedCache(config=model.config), input_ids=ids)
        assert torch.equal(solo.sequences[0, -8:], batch.sequences[row, -8:])


def test_prompt_of_one_row_serves_many(real: Any, prompts: Any) -> None:
    """A cache of one row that is given n rows is forked, not computed n times."""
    model, _ = real
    ids = prompts["input_ids"][1:2]
    cache = PagedCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache)
    blocks = cache.report().blocks
    found = run(model, cache, input_ids=ids, num_beams=4, max_new_tokens=4)
    expected = run(
        model, DynamicCache(config=model.config), input_ids=ids, num_beams=4, max_new_tokens=4
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert cache.report().blocks <= blocks + 2 * 4


def test_keys_and_values_are_bit_equal(real: Any, prompts: Any) -> None:
    """With attention that reads ordinary tensors nothing differs, so every bit must agree."""
    model, _ = real
    model.set_attn_implementation("sdpa")
    paged, dynamic = PagedCache(config=model.config), DynamicCache(config=model.config)
    for cache in (paged, dynamic):
        in_chunks(model, cache, prompts)
    for mine, theirs in zip(paged, dynamic, strict=True):
        for a, b in zip(mine[:2], theirs[:2], strict=True):
            assert torch.equal(a, b)


def test_stored_padding_reads_as_zeros(real: Any, prompts: Any) -> None:
    """Our mask tells the cache of padding; the first layer's K/V do not depend on attention."""
    model, _ = real
    paged, dynamic = PagedCache(config=model.config), DynamicCache(config=model.config)
    for attention, cache in (("hf_paged", paged), ("sdpa", dynamic)):
        model.set_attn_implementation(attention)
        in_chunks(model, cache, prompts)
    tokens = prompts["attention_mask"].bool()[:, None, :, None]
    for a, b in zip(next(iter(paged))[:2], next(iter(dynamic))[:2], strict=True):
        assert torch.equal(a, b.where(tokens, torch.zeros(())))


def in_chunks(model: PreTrainedModel, cache: Any, prompts: Any) -> None:
    """Fill a cache in three chunks, of which the second ends inside a block."""
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for stop in (200, 255, 256):
            start = cache.get_seq_length()
            model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
            )
