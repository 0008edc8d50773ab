"""Tiny random models of every architecture: a config is shrunk by rule, exceptions are in a table.

A field of a default config is set to what SIZES says for its name, wherever it has one; lists with
an entry a layer keep a few layers that show every combination; sub-configs are shrunk alike. What
a model needs besides is in `models.py`, one line a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

VOCAB = 99

_BY_SIZE: dict[Any, tuple[str, ...]] = {
    VOCAB: ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"),
    64: ("hidden_size", "n_embd", "d_model", "dim", "embedding_dim", "attention_hidden_size",
         "embedding_size", "input_embedding_size", "output_embedding_size", "emb_dim",
         "word_embed_proj_dim", "lru_width", "backbone_hidden_size"),
    96: ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "dff",
         "dense_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "dim_ff",
         "feed_forward_size", "n_inner", "mlp_hidden_size"),
    48: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "shared_intermediate_size", "moe_shared_expert_intermediate_size",
         "shared_experts_intermediate_size"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
        "encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads",
        "num_decoder_attention_heads", "swa_num_attention_heads", "linear_num_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
        "linear_num_value_heads", "index_n_heads", "index_block_size", "compress_rate"),
    2: ("num_key_value_heads", "num_kv_heads", "num_query_groups", "swa_num_key_value_heads",
        "multi_query_group_num", "num_experts_per_tok", "num_experts_per_token", "moe_topk",
        "moe_k", "top_k_experts", "linear_num_key_heads", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "type_vocab_size", "index_topk_blocks"),
    16: ("head_dim", "swa_head_dim", "d_kv", "linear_head_dim", "linear_key_head_dim",
         "linear_value_head_dim", "kv_channels", "kv_lora_rank", "qk_nope_head_dim", "dim_head",
         "d_head", "mamba_d_state", "state_size", "ssm_state_size", "index_head_dim"),
    24: ("v_head_dim", "q_lora_rank", "qk_head_dim"),
    1: ("n_group", "topk_group", "n_groups", "num_expert_group", "n_shared_experts",
        "num_shared_experts", "first_k_dense_replace", "num_dense_layers"),
    512: ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions",
          "max_source_positions", "context_length", "max_seq_len"),
    8: ("qk_rope_head_dim", "rotary_dim",  # and windows
        "sliding_window", "sliding_window_size", "attention_chunk_size", "window_size",
        "attention_window_size", "local_attention", "index_topk", "chunk_size", "mamba_chunk_size",
        "rel_extent", "d_rel"),
    0.0: ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"),
}  # fmt: skip
SIZES = {name: size for size, names in _BY_SIZE.items() for name in names}
DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
ROLE = {"is_decoder": True, "use_cache": True}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MAX_LAYERS, MIN_LAYERS = 4, 2


def shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    """Overrides that make a tiny config of `default`."""
    fields = default.to_dict()
    small = {name: SIZES[name] for name in fields if fields[name] is not None and name in SIZES}
    if fields.get("kv_lora_rank"):  # MLA: every head has keys of its own, part of them rotated
        small |= {
            name: SIZES["num_attention_heads"] for name in small if name.startswith("num_key")
        }
        small |= {name: SIZES["qk_rope_head_dim"] for name in small if name == "head_dim"}
    small |= {name: value for name, value in (TOKENS | ROLE).items() if name in fields}
    for name in default.sub_configs:
        sub = getattr(default, name, None)
        if isinstance(sub, PreTrainedConfig):
            small[name] = {"model_type": sub.model_type, **shrunk(sub)}
    depth = next((name for name in DEPTH if isinstance(fields.get(name), int)), None)
    if depth is not None:
        per_layer = {
            name: values
            for name, values in fields.items()
            if isinstance(values, list) and len(values) == fields[depth] > MIN_LAYERS
        }
        kept = representatives(list(zip(*per_layer.values(), strict=True)))
        small |= {name: [values[i] for i in kept] for name, values in per_layer.items()}
        small[depth] = len(kept) or MIN_LAYERS
    return small


def representatives(layers: list[tuple]) -> list[int]:
    """A few layers, in order, that show every combination of what is said for each layer."""
    if not layers:
        return []
    seen, kept = [], []
    for index, layer in enumerate(layers):
        if layer not in seen:
            seen.append(layer)
            kept.append(index)
    rest = [index for index in range(len(layers)) if index not in kept]
    missing = max(MIN_LAYERS, MAX_LAYERS if len(kept) > 1 else 0) - len(kept)
    return sorted(kept + rest[: max(missing, 0)])


def merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` with `overrides`, sub-dicts merged alike."""
    out = copy.deepcopy(base)
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merged(out[name], value) if both else value
    return out


def tiny_config(model_type: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """The tiny config of an architecture."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**merged(shrunk(kind()), overrides))


def build(
    make: Callable[..., PreTrainedModel],
    config: PreTrainedConfig,
    attention: str | dict[str, str] | None = None,
) -> PreTrainedModel:
    """A random float32 model whose weights are large enough to tell tokens apart.

    Args:
        make: called with the config and `attn_implementation`.
        config: of the model; copied, as a model writes its attention implementation into it.
        attention: the attention implementation, also by sub-config; None for what transformers
            prefers.
    """
    torch.manual_seed(0)
    model = make(copy.deepcopy(config), attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (parameter.ndim > 1 and "norm" not in name) or name.endswith("_gate"):
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model
