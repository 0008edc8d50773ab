"""The ways in which transformers' own tests use a cache, on a PagedCache and many architectures.

Each says what must be equal without another cache to compare with, so that it also holds where
both would be wrong alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged import PagedCache

from .compare import TOLERANCE, Inputs, generate, same_logits, text_inputs
from .test_causal import tiny

ARCHITECTURES = (
    "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen2", "qwen3",
    "qwen3_moe", "mixtral", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "cohere2", "olmo2",
    "starcoder2", "deepseek_v3", "stablelm", "granite", "glm4", "smollm3", "ministral3",
)  # fmt: skip
SAMPLE = ("llama", "gemma3_text", "bloom", "deepseek_v3")
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in ARCHITECTURES
]
WIDE = {"sliding_window": 400, "attention_chunk_size": 400}
_built: dict[str, PreTrainedModel] = {}


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    name = request.param
    if name not in _built:
        _built[name] = tiny(name, "hf_paged")
    return _built[name]


def run(model: PreTrainedModel, inputs: Inputs, cache: PagedCache | None = None, **kw: Any) -> Any:
    cache = PagedCache(config=model.config, block_size=4) if cache is None else cache
    out = generate(model, cache, inputs, **kw)
    cache.pool.check()
    return out


def test_continue_from_past_key_values(model: PreTrainedModel) -> None:
    """Three tokens and then five on the same cache are the eight of one call."""
    inputs = text_inputs()
    whole = run(model, inputs, max_new_tokens=8)
    cache = PagedCache(config=model.config, block_size=4)
    first = run(model, inputs, cache, max_new_tokens=3)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    rest = {"input_ids": first.sequences, "attention_mask": mask}
    second = run(model, rest, cache, max_new_tokens=5)
    assert torch.equal(second.sequences, whole.sequences)


def test_start_from_inputs_embeds(model: PreTrainedModel) -> None:
    """Embeddings of the prompt give what its ids give."""
    inputs = text_inputs()
    expected = run(model, inputs, max_new_tokens=8)
    found = run(model, embedded(model, inputs), max_new_tokens=8)
    same_logits(found, expected)
    assert torch.equal(found.sequences, expected.sequences[:, -8:])


def test_continue_from_inputs_embeds(model: PreTrainedModel) -> None:
    """Embeddings of all tokens, on a cache that holds most, give what their ids give anew."""
    inputs, turn = text_inputs(), text_inputs(width=4, padding=0)["input_ids"]
    continued = []
    for cache in (PagedCache(config=model.config, block_size=4), DynamicCache(config=model.config)):
        first = generate(model, cache, inputs, max_new_tokens=3)
        ids = torch.cat([first.sequences, turn], dim=1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3 + turn.shape[1]), value=1)
        rest = {"input_ids": ids, "attention_mask": mask}
        continued.append(generate(model, cache, embedded(model, rest), max_new_tokens=5))
    found, theirs = continued
    same_logits(found, theirs)
    expected = run(model, rest, max_new_tokens=5)
    same_logits(found, expected)
    assert torch.equal(found.sequences, expected.sequences[:, -5:])


def embedded(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}


def test_assisted_decoding_matches_greedy(model: PreTrainedModel) -> None:
    """With an assistant that is right now and then.

    It has no windows, as older versions of transformers trip over an assistant's.
    """
    inputs = {key: value[:1] for key, value in text_inputs().items()}
    torch.manual_seed(3)
    assistant = tiny(model.config.model_type, **WIDE)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    expected = run(model, inputs, max_new_tokens=16)
    found = run(model, inputs, max_new_tokens=16, assistant_model=assistant)
    assert torch.equal(found.sequences, expected.sequences)
    same_logits(found, expected)


def test_beam_search_from_one_row(model: PreTrainedModel) -> None:
    """A prompt that was computed once serves all beams as one computed for each."""
    inputs = {key: value[:1] for key, value in text_inputs().items()}
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    expected = run(model, inputs, **beams)
    cache = PagedCache(config=model.config, block_size=4).prefill(model, **inputs)
    assert cache.batch_size == 1
    found = run(model, inputs, cache, **beams)
    assert torch.equal(found.sequences, expected.sequences)


def test_a_batch_is_its_rows(model: PreTrainedModel) -> None:
    """Each row of a padded batch gives what it gives alone, without padding."""
    inputs = text_inputs(rows=3)
    batch = run(model, inputs, max_new_tokens=8)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        ids = inputs["input_ids"][row, mask][None]
        solo = run(model, {"input_ids": ids}, max_new_tokens=8)
        assert torch.equal(solo.sequences[0, -8:], batch.sequences[row, -8:])
        for mine, theirs in zip(solo.logits, batch.logits, strict=True):
            torch.testing.assert_close(mine[0], theirs[row], atol=TOLERANCE, rtol=0)


def test_extra_left_padding_changes_nothing(model: PreTrainedModel) -> None:
    inputs = text_inputs()
    padded = {key: torch.nn.functional.pad(value, (19, 0)) for key, value in inputs.items()}
    expected, found = (run(model, each, max_new_tokens=8) for each in (inputs, padded))
    same_logits(found, expected)
    assert torch.equal(found.sequences[:, -8:], expected.sequences[:, -8:])
