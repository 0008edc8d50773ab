"""What a config says about its layers: which keep their K/V in blocks, and how large those are."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

logger = logging.getLogger("hf_paged")

NAME = "hf_paged"  # of our attention and mask functions
READ_BY_MODEL = "the model reads K/V itself"
UNNAMED = "an attention implementation that the config does not name"
KEEPING_LAYERS = (CacheLayerMixin, LinearAttentionCacheLayerMixin)  # not those that share K/V
# The layers that keep nothing but K/V, which are in blocks; and those whose K/V are in blocks and
# whose other states stay as transformers keeps them. All others keep transformers' own layer.
PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
PAGED_LAYERS = (
    *PLAIN_LAYERS,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
# Models that take no transformers Cache, and where their past is instead.
WITHOUT_CACHE = {
    "blt": "it needs one for each of its three transformers",
    "minimax": "it takes no other than its own MiniMaxCache",
    "openai-gpt": "it computes the whole past anew for every token",
    "reformer": "it keeps hash buckets",
    "rwkv": "it keeps recurrent states",
    "xlnet": "it keeps hidden states (mems)",
    "xlstm": "it keeps recurrent states",
}
MEDIA = ("image", "video", "audio", "speech")
# Models that keep by how much the positions of the last prompt differ from its tokens (rope_deltas)
# and add that to those of any prompt behind a cache; their decoders' names begin with theirs.
WITH_OFFSETS = (
    *("cohere_compass", "cosmos3", "ernie4_5_vl_moe", "exaone4_5", "glm46v", "glm4v", "glm_image"),
    *("glm_ocr", "hunyuan_vl", "hy_v4_vl", "hyperclovax_vision_v2", "minicpmv4_7", "paddleocr_vl"),
    *("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_omni_moe", "qwen3_vl"),
    "qwen4_exp",
)
# Models that take no position_ids and count columns, padding included.
POSITIONS_WITH_PADDING = {
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "moss_transcribe_diarize",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "roformer",
    "trocr",
    "whisper",
    "xlm",
}
# Models whose K/V depend on more than the tokens in front, and on what.
WITHOUT_WINDOW = "its tokens see all that a cache still holds, and so it matters where it was cut"
NOT_REUSABLE = {
    "kyutai_speech_to_text": WITHOUT_WINDOW,  # their windows make a cache drop tokens, and their
    "moshi": WITHOUT_WINDOW,  # masks show what is left
    "recurrent_gemma": "it keeps recurrent states, before transformers 5.24 outside of a cache",
}
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


class ModelSpec:
    """What a model's config says of its layers, as it was when it was read.

    Attributes:
        whole_config: the model's; `config` its decoder's; `attending` that in which the decoder
            looks up its attention implementation.
        windows: the layers to keep in blocks, and the tokens that a query of each looks back on.
        stateful_layers: the layers that keep something outside of the blocks.
        plain_layers: the layers of transformers' own cache, empty; what a cache's are made of.
        media_tokens: the token ids that stand for a part of an image, video or sound.

    Raises:
        ValueError: there is nothing to page.
    """

    def __init__(self, whole_config: PreTrainedConfig):
        self.whole_config = whole_config
        self.config, self.attending = decoder_config(whole_config), attending_config(whole_config)
        check_cacheable(self.config)
        self.windows = paged_windows(self.config)
        self.stateful_layers = stateful_layers(self.config)
        self.plain_layers = dynamic_layers(self.config)
        self.media_tokens = media_tokens(whole_config)

    @cached_property
    def longest_prefix(self) -> int | None:
        """The longest prompt whose beginning can be reused, None for any.

        Raises:
            ValueError: the model's prefixes cannot be reused exactly.
        """
        return longest_prefix(self.whole_config)


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the decoder in a composite or encoder-decoder model's, itself in others."""
    decoder = config.get_text_config(decoder=True)
    # transformers resolves `decoder_layers`, but not what T5 and its kin call the same.
    layers = getattr(decoder, "num_decoder_layers", None)
    if decoder.is_encoder_decoder and layers not in (None, decoder.num_hidden_layers):
        decoder = copy.deepcopy(decoder)
        decoder.num_hidden_layers = layers
    return decoder


def attending_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config in which the decoder of a whole model's looks up its attention implementation."""
    decoder = decoder_config(config)
    return config if type(decoder) is type(config) else decoder  # not a copy, which goes stale


def models_of(config_type: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """The models of transformers, as far as they are imported, that are made from such a config."""
    return (model for model in _subclasses(PreTrainedModel) if model.config_class is config_type)


def _subclasses(kind: Any) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def other_attention(config: PreTrainedConfig) -> str | None:
    """What reads K/V instead of our attention function, None if that does.

    Args:
        config: where the model looks it up.
    """
    name = config._attn_implementation
    if name == NAME:
        return None
    if not _can_choose(type(config)):  # type: ignore[arg-type]  # a class is hashable
        return READ_BY_MODEL
    return f"another attention implementation ({name})" if name else UNNAMED


@cache
def _can_choose(config_type: Any) -> bool:
    models = list(models_of(config_type))
    return not models or any(model._can_set_attn_implementation() for model in models)


@cache
def advise(reader: str) -> None:
    """Say once in the log what would read K/V faster than this reader that is not ours."""
    if reader != READ_BY_MODEL:
        logger.warning(
            "K/V of a PagedCache are gathered in each step for %s; load the model with "
            'attn_implementation="hf_paged", which most models take, to have them read in place.',
            reader,
        )


def dynamic_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that transformers itself makes for a decoder's config, empty."""
    return DynamicCache(config=config).layers


def cross_layers(config: PreTrainedConfig) -> list[int]:
    """The layers of a decoder that attend to another input only, as Mllama's to its images."""
    return list(getattr(config, "cross_attention_layers", None) or ())


def paged_windows(config: PreTrainedConfig) -> dict[int, int | None]:
    """The layers to keep in blocks, and the tokens that a query of each may look back on.

    Chunked attention is a window here: a query never needs more than a chunk.
    """
    return {
        index: getattr(layer, "sliding_window", None)
        for index, layer in enumerate(dynamic_layers(config))
        if type(layer) in PAGED_LAYERS and index not in cross_layers(config)
    }


def stateful_layers(config: PreTrainedConfig) -> list[int]:
    """The layers that keep something outside of the blocks, which no roll-back restores."""
    return [
        index
        for index, layer in enumerate(dynamic_layers(config))
        if (isinstance(layer, KEEPING_LAYERS) and type(layer) not in PLAIN_LAYERS)
        or index in cross_layers(config)
    ]


def media_tokens(config: PreTrainedConfig) -> list[int]:
    """The token ids of a whole model's config that stand for a part of an image, video or sound."""
    names = (f"{kind}_token_{end}" for kind in MEDIA for end in ("id", "index"))
    found = {getattr(config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int))


def longest_prefix(config: PreTrainedConfig) -> int | None:
    """The longest prompt whose beginning has the K/V that it would have alone; None is any.

    Beyond it the rotary frequencies depend on the length itself (dynamic scaling, LongRoPE).

    Args:
        config: of the whole model.

    Raises:
        ValueError: layers keep other states than K/V, which are known for whole prompts only, or
            K/V depend on another input too, or on how a prompt was cut.
    """
    kind, config = config.model_type, decoder_config(config)
    if kind.startswith(WITH_OFFSETS) or config.model_type.startswith(WITH_OFFSETS):
        raise ValueError(
            f"Prefixes of a {kind} model cannot be reused: it keeps the offset of the last "
            "prompt's positions (M-RoPE) for all that have a cache; use plain caches."
        )
    if config.model_type in NOT_REUSABLE:
        raise ValueError(
            f"Prefixes of a {kind} model cannot be reused: {NOT_REUSABLE[config.model_type]}; use "
            "plain caches."
        )
    if config.is_encoder_decoder:
        raise ValueError(
            "Prefixes of an encoder-decoder model cannot be reused: the K/V of its decoder depend "
            "on what the encoder reads; use plain caches."
        )
    others = stateful_layers(config)
    if others:
        kind = type(dynamic_layers(config)[others[0]]).__name__
        raise ValueError(
            f"Prefixes of this model cannot be reused: {len(others)} layers keep other states than "
            f"K/V ({kind}), which are known for whole prompts only; use plain caches."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type", "default")
        if kind == "longrope" or "dynamic" in kind:
            original = parameters.get("original_max_position_embeddings")
            return original or config.max_position_embeddings
    return None


def check_cacheable(config: PreTrainedConfig) -> None:
    """Raise a ValueError that says why, if there is nothing to page in a decoder of this config."""
    kind = config.model_type
    if kind in WITHOUT_CACHE:
        raise ValueError(f"A {kind} model takes no transformers Cache: {WITHOUT_CACHE[kind]}.")
    if not paged_windows(config):
        raise ValueError(
            f"No layer of this {kind} model keeps ordinary keys and values that could be paged; "
            "use a DynamicCache."
        )


def layer_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The config of one layer, where a model's layers differ."""
    configs = getattr(config, "per_layer_config", None)
    return configs[layer] if configs else config


def elements_per_token(config: PreTrainedConfig) -> int:
    """K and V elements that one layer stores for a token, by the usual names of config fields."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # MLA models cache the expanded K and V
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads * (key_dim + config.v_head_dim)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim


def bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype | None) -> int:
    """Bytes of K and V that all paged layers of a decoder's config store for a token."""
    declared = dtype or config.dtype or torch.get_default_dtype()
    itemsize = getattr(torch, declared).itemsize if isinstance(declared, str) else declared.itemsize
    return sum(
        itemsize * elements_per_token(layer_config(config, layer))
        for layer in paged_windows(config)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def parse_memory(memory: int | str) -> int:
    """Bytes in `memory`: an int, or text such as "512MiB", "4GiB" or "4GB" (both 1024-based).

    Raises:
        ValueError: it is neither, or not more than 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(memory), re.IGNORECASE)
    if isinstance(memory, bool) or match is None or float(match[1]) <= 0:
        raise ValueError(f'max_memory must be bytes or text such as "4GiB", not {memory!r}.')
    return int(float(match[1]) * UNITS[match[2].upper()])
