"""Which fields of a config count: those that change K/V in any architecture."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_paged.fingerprint import IRRELEVANT, config_fingerprint

from . import test_causal, test_encoder_decoder
from .compare import text_inputs
from .models import BASELINE, REFUSED

# Values for fields whose own does not say what else they may be.
OTHER: dict[str, Any] = {
    "architectures": ["Other"],
    "bad_words_ids": [[5]],
    "begin_suppress_tokens": [5],
    "classifier_activation": "relu",
    "dtype": "float32",
    "id2label": {0: "a", 1: "b", 2: "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "problem_type": "regression",
    "summary_activation": "tanh",
    "summary_type": "mean",
    "suppress_tokens": [5],
    "task_specific_params": {"other": 1},
    "torch_dtype": "float32",
    "transformers_version": "0",
}


def other(name: str, value: Any) -> Any:
    """Another value for a field."""
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool) or name.startswith(("output_", "do_", "tie_")):
        return not value
    if isinstance(value, float) or "drop" in name:
        return (value or 0.0) + 0.25
    return (value or 0) + 1


def decoder_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that the decoder reads: a part of the whole, or the whole."""
    decoder = config.get_text_config(decoder=True)
    return decoder if any(decoder is part for part in vars(config).values()) else config


def states(model: PreTrainedModel, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """K and V of all layers that keep some, after a prompt and a token."""
    cache: Cache = DynamicCache(config=model.config)
    ids, step = text_inputs(padding=0)["input_ids"], torch.tensor([[5], [7]])
    own, name = cache, "input_ids"
    if inputs:
        cache, name = EncoderDecoderCache(own, DynamicCache(config=model.config)), "decoder_input_ids"
    with torch.no_grad():
        for new in (ids, step):
            model.base_model(**inputs, **{name: new}, past_key_values=cache, use_cache=True)
    kept = [layer for layer in own.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    return [part for layer in kept for part in (layer.keys, layer.values)]


def with_weights(model: PreTrainedModel, source: PreTrainedModel) -> PreTrainedModel:
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    return model


def check(model: PreTrainedModel, rebuild: Any, inputs: dict[str, Any]) -> None:
    config = copy.deepcopy(model.config)
    decoder = decoder_of(config)
    for name, value in decoder.to_dict().items():
        if name in IRRELEVANT - {"return_dict"}:
            setattr(decoder, name, other(name, value))
    changed = with_weights(rebuild(config), model)
    for before, after in zip(states(model, inputs), states(changed, inputs), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", test_causal.NAMES)
def test_x(name: str) -> None:
    if name in REFUSED:
        return
    from transformers import AutoModelForCausalLM
    from .zoo import build
    m = test_causal.tiny(name, "eager")
    check(m, lambda c: build(AutoModelForCausalLM.from_config, c, "eager"), {})


@pytest.mark.parametrize("name", test_encoder_decoder.NAMES)
def test_y(name: str) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from .zoo import build
    m = test_encoder_decoder.tiny(name, "eager")
    auto = AutoModelForSpeechSeq2Seq if name in test_encoder_decoder.SPEECH else AutoModelForSeq2SeqLM
    check(m, lambda c: build(auto.from_config, c, "eager"), test_encoder_decoder.inputs_of(name))
