"""Encoder-decoder models: self-attention in blocks, cross-attention as transformers keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
)

from hf_paged import PagedCache, encoder_decoder_cache

from .compare import Inputs, Result, beams, compare, decode_path, generate, greedy, groups
from .compare import text_inputs as text
from .models import is_tested
from .zoo import build, tiny_config

SECTION = "Encoder-decoder models"
SAMPLE = ("t5", "bart", "whisper")
FLAT = {"encoder_layers": 3, "decoder_layers": 2}  # one number must not stand for the other
T5 = {"num_layers": 3, "num_decoder_layers": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bart": FLAT,
    "bigbird_pegasus": {**FLAT, "attention_type": "original_full"},
    "blenderbot": FLAT,
    "blenderbot-small": FLAT,
    "led": {**FLAT, "attention_window": 8},
    "longt5": T5,
    "m2m_100": FLAT,
    "marian": {**FLAT, "decoder_vocab_size": 99},
    "mbart": FLAT,
    "moonshine": {"encoder_num_hidden_layers": 3, "decoder_num_hidden_layers": 2},
    "mt5": T5,
    "mvp": FLAT,
    "nllb-moe": {**FLAT, "num_experts": 4, "expert_capacity": 64},
    "pegasus": FLAT,
    "pegasus_x": {**FLAT, "block_size": 8, "num_global_tokens": 2},
    "plbart": FLAT,
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "speech_to_text": {
        **FLAT, "num_conv_layers": 1, "conv_kernel_sizes": [3], "conv_channels": 16,
        "input_feat_per_channel": 8, "input_channels": 1,
    },
    "switch_transformers": {**T5, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5": T5,
    "umt5": T5,
    "whisper": {**FLAT, "num_mel_bins": 8, "max_source_positions": 20},
}  # fmt: skip
SPEECH = {
    "moonshine": "input_values",
    "speech_to_text": "input_features",
    "whisper": "input_features",
}
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow)
    for name in filter(is_tested, OVERRIDES)
]
# What transformers cannot do on a DynamicCache either; the suite checks that.
NOT_IN_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    # Takes one token at a time behind the first ones.
    "prophetnet": ("assisted decoding", "prompt lookup", "conversation"),
}
UNMASKED_PADDING = ("led",)  # on a DynamicCache, so that a PagedCache refuses it


def inputs_of(name: str) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    if name == "moonshine":
        return {"input_values": torch.randn(2, 4000, generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator)}
    if name == "speech_to_text":
        return {"input_features": torch.randn(2, 40, 8, generator=generator)}
    return text()


def tiny(name: str, attention: str | None = None, **sizes: int) -> PreTrainedModel:
    auto = AutoModelForSpeechSeq2Seq if name in SPEECH else AutoModelForSeq2SeqLM
    model = build(auto.from_config, tiny_config(name, {**OVERRIDES[name], **sizes}), attention)
    model.generation_config.decoder_start_token_id = 1
    model.generation_config.forced_eos_token_id = None
    return model


def assisted(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    # Of one depth, as the assistant has a cache that transformers made, in older versions too deep.
    name = model.config.model_type
    assistant = tiny(name, **({"num_layers": 2} if OVERRIDES[name] is T5 else {}))
    inputs = {key: value[:1] for key, value in inputs.items()}
    return generate(model, cache, inputs, assistant_model=assistant)


def padded_prompt(model: PreTrainedModel, cache: Cache, inputs: Inputs, pad: int = 0) -> Any:
    """The decoder has a prompt, which is padded on the left."""
    prompt = text(width=9, padding=3)
    mask = prompt["attention_mask"]
    ids = prompt["input_ids"].masked_fill(mask == 0, pad)
    ids.scatter_(1, mask.argmax(1, keepdim=True), model.generation_config.decoder_start_token_id)
    return generate(
        model, cache, {**inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    )


def prompt_lookup(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    """One row, in whose decoder's prompt there is something to look up."""
    ids = torch.tensor([[1, 7, 8, 9, 7, 8, 9, 7]])
    inputs = {key: value[:1] for key, value in inputs.items()} | {"decoder_input_ids": ids}
    return generate(model, cache, inputs, prompt_lookup_num_tokens=3)


def conversation(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    """More tokens behind the first answer, on the same cache."""
    out = generate(model, cache, inputs, max_new_tokens=5)
    turn = text(width=4, padding=0)["input_ids"]
    ids = torch.cat([out.sequences, turn], dim=1)
    return generate(model, cache, {**inputs, "decoder_input_ids": ids}, max_new_tokens=5)


RUNS = {
    "greedy": greedy,
    "beams": beams,
    "assisted decoding": assisted,
    "padded prompt": padded_prompt,
    "prompt lookup": prompt_lookup,
    "conversation": conversation,
}


def dynamic() -> Cache:
    """Without a config, as older versions take the encoder's depth from it."""
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


@pytest.mark.parametrize("name", NAMES)
def test_equals_dynamic_cache(name: str, note: Callable[[Result], None]) -> None:
    result = Result(SECTION, name)
    models = tiny(name), tiny(name, "hf_paged")
    for kind, run in RUNS.items():
        caches = dynamic(), encoder_decoder_cache(models[1].config, block_size=4)
        if kind in NOT_IN_TRANSFORMERS.get(name, ()):
            with pytest.raises(AssertionError, match="length 1"):
                run(models[0], caches[0], inputs_of(name))
            result.remarks.append(f"no {kind} in transformers")
        elif kind == "padded prompt" and name in UNMASKED_PADDING:
            with pytest.raises(ValueError, match="no mask for single tokens") as error:
                run(models[1], caches[1], inputs_of(name))
            result.remarks.append(str(error.value))
        else:
            compare(run, models, caches, inputs_of(name))
    cache = encoder_decoder_cache(models[1].config, block_size=4)
    paged = cache.self_attention_cache
    result.path = decode_path(models[1], paged, cache, inputs_of(name))
    result.groups = groups(paged)
    note(result)


@pytest.mark.parametrize("name", ["bart", *UNMASKED_PADDING])
def test_which_models_attend_to_padding(name: str) -> None:
    """Theirs depends on what the padding is, from the second token on."""
    model = tiny(name)
    first, other = (padded_prompt(model, dynamic(), inputs_of(name), pad) for pad in (0, 5))
    assert torch.equal(first.logits[0], other.logits[0])
    assert torch.equal(first.logits[1], other.logits[1]) == (name not in UNMASKED_PADDING)


def test_rows_of_both_caches_move_together() -> None:
    """repeat, select and crop of an EncoderDecoderCache do to ours what they do to DynamicCache."""
    model = tiny("bart", "hf_paged")
    inputs = inputs_of("bart")
    outs = []
    for cache in (dynamic(), encoder_decoder_cache(model.config, block_size=4)):
        ids = torch.arange(3, 15).view(2, 6)
        with torch.no_grad():
            out = model(**inputs, decoder_input_ids=ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 1]))
            cache.crop(-2)
            encoded = (out.encoder_last_hidden_state[[1, 0, 0]],)
            outs.append(
                model(
                    encoder_outputs=encoded,
                    attention_mask=inputs["attention_mask"][[1, 0, 0]],
                    decoder_input_ids=ids[:1, :2].repeat(3, 1),
                    past_key_values=cache,
                ).logits
            )
        assert cache.get_seq_length() == 6
    torch.testing.assert_close(outs[1], outs[0], atol=3e-4, rtol=0)


def test_a_bare_paged_cache_is_refused() -> None:
    """Cross-attention would write into the same layers."""
    model = tiny("bart", "hf_paged")
    with pytest.raises(RuntimeError, match="EncoderDecoderCache"):
        greedy(model, PagedCache(config=model.config), text())
