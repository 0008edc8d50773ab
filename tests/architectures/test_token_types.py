"""Models whose prompts see all of themselves, by their token types, in the first forward only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_paged import PagedCache

from . import test_causal, test_multimodal
from .compare import TOLERANCE, text_inputs
from .models import is_tested

# The token type of a prompt that sees all of itself.
OF_PROMPTS = {"hrm_text": 1, "paligemma": 0}
TINY: dict[str, Callable[[str, str], PreTrainedModel]] = {
    "hrm_text": test_causal.tiny,
    "paligemma": test_multimodal.tiny,
}
CHUNKS = (4, 9, 1, 1)  # the second is longer than the past, then tokens one by one


def logits_of(model: PreTrainedModel, cache: Cache, token_type: int) -> list[torch.Tensor]:
    ids, logits = text_inputs(width=sum(CHUNKS), padding=0)["input_ids"], []
    for chunk in ids.split(CHUNKS, dim=1):
        types = torch.full_like(chunk, token_type)
        with torch.no_grad():
            out = model(input_ids=chunk, token_type_ids=types, past_key_values=cache)
        logits.append(out.logits)
    return logits


@pytest.mark.parametrize("name", [name for name in TINY if is_tested(name)])
def test_only_the_first_chunk_sees_all_of_itself(name: str) -> None:
    """A cache that never said it was initialized let every chunk see its own later tokens."""
    model = TINY[name](name, "hf_paged")
    expected = logits_of(model, DynamicCache(config=model.config), OF_PROMPTS[name])
    causal = logits_of(model, DynamicCache(config=model.config), 1 - OF_PROMPTS[name])
    assert (expected[0] - causal[0]).abs().max() > 1e-2  # or token types would not matter
    cache = PagedCache(config=model.config, block_size=4)
    found = logits_of(model, cache, OF_PROMPTS[name])
    for chunk, other in zip(found, expected, strict=True):
        torch.testing.assert_close(chunk, other, atol=TOLERANCE, rtol=0)
    layers, report = len(cache.layers), cache.report()
    assert sum(report.dense_calls.values()) == layers  # of the first chunk, whose mask is more
    assert report.paged_calls == layers * (len(CHUNKS) - 1)
