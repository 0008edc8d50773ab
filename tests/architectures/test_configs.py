"""Which fields of a config count: all but those that change no bit of K/V in any architecture."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from hf_paged.prefill import cache_argument
from hf_paged.prefix.identity import IRRELEVANT, RELEVANT, config_fingerprint

from . import test_causal, test_encoder_decoder
from .compare import text_inputs
from .models import IS_NEWEST, LEFT_OUT, OVERRIDES, REFUSED
from .zoo import build, tiny_config

# Other values for fields where a rule finds none.
OTHER: dict[str, Any] = {
    "architectures": ["Other"],
    "begin_suppress_tokens": [5],
    "classifier_activation": "relu",
    "dtype": "float32",
    "id2label": {0: "a", 1: "b", 2: "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "problem_type": "regression",
    "summary_activation": "tanh",
    "summary_type": "mean",
    "suppress_tokens": [5],
    "transformers_version": "0",
}
# With these another value ends in an error, rather than in other K/V.
FIXED = {"*": {"return_dict"}, "diffllama": {"attention_dropout"}, "whisper": {"use_cache"}}
# Those that older checkpoints' configs have, and no class of transformers.
OF_OLD = {"gradient_checkpointing", "num_labels", "task_specific_params", "torch_dtype"}
# These have code of that kind in an encoder of theirs.
ROTARY = {"evolla"}
WITHOUT_DEFAULT = {"encoder-decoder", "nougat", "speech-encoder-decoder", "vision-encoder-decoder"}


def other(name: str, value: Any) -> Any:
    """Another value for a field."""
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool) or name.startswith("output_"):
        return not value
    if isinstance(value, list):
        return [*value, 5]
    if isinstance(value, float) or any(word in name for word in ("drop", "logit_", "_cap")):
        return (value or 0.0) + 0.25
    return (value or 0) + 1


def decoder_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config that the decoder reads: a part of the whole, or the whole."""
    decoder = config.get_text_config(decoder=True)
    return decoder if any(decoder is part for part in vars(config).values()) else config


def states(model: PreTrainedModel, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """K and V of all layers that keep some, of a prompt; `inputs` are the encoder's."""
    ids, own = text_inputs(padding=0)["input_ids"], DynamicCache(config=model.config)
    cache: Cache = own
    if inputs:
        cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
    name, body = "decoder_input_ids" if inputs else "input_ids", model.base_model
    with torch.no_grad():
        body(**inputs, **{name: ids}, **cache_argument(body, cache))
    kept = [layer for layer in own.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    assert kept
    return [part for layer in kept for part in (layer.keys, layer.values)]


def check_irrelevant(
    make: Callable[..., PreTrainedModel], config: PreTrainedConfig, inputs: dict[str, Any]
) -> None:
    """AssertionError unless a model with other values in all fields that do not count, and the same
    weights, computes the same K/V to the bit."""
    kind, changed = config.model_type, copy.deepcopy(config)
    decoder = decoder_of(changed)
    fixed = FIXED["*"] | FIXED.get(kind, set())
    fixed |= {name for name, kinds in RELEVANT.items() if decoder.model_type in kinds}
    for name, value in decoder.to_dict().items():
        if name in IRRELEVANT - fixed:
            setattr(decoder, name, other(name, value))
            assert getattr(decoder, name) != value or name == "dtype"
    assert config_fingerprint(changed) == config_fingerprint(config)
    model, again = build(make, config, "eager"), build(make, changed, "eager")
    weights = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, weight in again.named_parameters():
            weight.copy_(weights.get(name, weight))
    for before, after in zip(states(model, inputs), states(again, inputs), strict=True):
        assert torch.equal(before, after)


CAUSAL = [param for param in test_causal.NAMES if param.values[0] not in REFUSED]


@pytest.mark.parametrize("name", CAUSAL)
def test_fields_that_do_not_count_change_no_kv(name: str) -> None:
    config = tiny_config(name, OVERRIDES.get(name, {}))
    check_irrelevant(AutoModelForCausalLM.from_config, config, {})


@pytest.mark.parametrize("name", test_encoder_decoder.NAMES)
def test_nor_do_they_in_encoder_decoder_models(name: str) -> None:
    auto = AutoModelForSeq2SeqLM
    if name in test_encoder_decoder.SPEECH:
        auto = AutoModelForSpeechSeq2Seq
    config = tiny_config(name, test_encoder_decoder.OVERRIDES[name])
    check_irrelevant(auto.from_config, config, test_encoder_decoder.inputs_of(name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_theta", 500.0),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}),
        ("rms_norm_eps", 1e-5),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("num_hidden_layers", 3),
        ("num_key_value_heads", 4),
        ("head_dim", 8),
        ("hidden_size", 128),
        ("intermediate_size", 128),
        ("max_position_embeddings", 99),
        ("vocab_size", 100),
        ("sliding_window", 8),
        ("chunk_size_feed_forward", 1),  # another order of sums in the models of BERT
        ("router_jitter_noise", 0.5),  # a threshold in PhiMoE
        ("quantization_config", {"bits": 4}),
        ("a_field_of_a_model_that_is_to_come", 1),
    ],
)
def test_all_else_counts(name: str, value: Any) -> None:
    config = LlamaConfig()
    before = config_fingerprint(config)
    if name not in config.to_dict():  # as a version of transformers says it that knows the field
        setattr(config, name, None)
        assert config_fingerprint(config) == before
    setattr(config, name, value)
    assert config_fingerprint(config) != before


def test_what_counts_in_a_model_of_several_parts() -> None:
    """Of its decoder what counts there, and all of the others: K/V of an image depend on them."""
    before = config_fingerprint(Gemma3Config())
    for part, name, value, counts in (
        ("text_config", "eos_token_id", 7, False),
        ("text_config", "rms_norm_eps", 1.0, True),
        ("vision_config", "layer_norm_eps", 1.0, True),
        ("vision_config", "attention_dropout", 0.5, True),
        (None, "eos_token_id", 7, False),
        (None, "mm_tokens_per_image", 7, True),
    ):
        config = Gemma3Config()
        setattr(config if part is None else getattr(config, part), name, value)
        assert (config_fingerprint(config) != before) == counts, (part, name)


def test_where_positions_begin_behind_the_id_of_padding_it_counts() -> None:
    """In all models of transformers that generate, told by how their code finds positions."""
    counting = re.compile(r"create_position_ids|\+ (self\.)?padding_idx|padding_idx \+")
    names = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    found = set()
    for name in names & {*CONFIG_MAPPING.keys()} - {*LEFT_OUT, *WITHOUT_DEFAULT}:
        decoder = CONFIG_MAPPING[name]().get_text_config(decoder=True)
        folder = Path(inspect.getfile(type(decoder))).parent
        if any(counting.search(path.read_text()) for path in folder.glob("modeling_*.py")):
            found.add(decoder.model_type)
    assert found - ROTARY <= RELEVANT["pad_token_id"]
    if IS_NEWEST:
        assert found - ROTARY == RELEVANT["pad_token_id"]


@pytest.mark.parametrize(("name", "value"), [("pad_token_id", 5), ("initializer_range", 0.5)])
def test_what_counts_in_some_models_only(name: str, value: float) -> None:
    kinds = [kind for kind in RELEVANT[name] if kind in CONFIG_MAPPING]
    assert kinds or not IS_NEWEST
    for kind in kinds:
        config = CONFIG_MAPPING[kind]()
        before = config_fingerprint(config)
        setattr(config, name, value)
        assert config_fingerprint(config) != before


def test_the_table_has_no_name_that_no_config_has() -> None:
    declared = {field.name for kind in CONFIG_MAPPING.values() for field in fields(kind)}
    generation = GenerationConfig().to_dict().keys()
    assert declared | generation | OF_OLD >= IRRELEVANT or not IS_NEWEST
