"""Every architecture of transformers' causal-LM mapping: what its tiny config needs besides the
rule, what transformers itself cannot do with it, and which are refused or left out, and why.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import transformers
from packaging.version import Version

IS_NEWEST = Version(transformers.__version__) >= Version("5.24")
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}
HYBRID = {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"]}
SHARED = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
LLAMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["chunked_attention", FULL, "chunked_attention", FULL],
    "no_rope_layers": [1, 0, 1, 0],
    "moe_layers": [1, 3],
}

# What `shrunk` cannot know: sizes that must agree, layers that are not listed in the config.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA_2, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL],
        "rope_parameters": {SLIDING: ROPE, FULL: ROPE},
    },
    "dbrx": {
        "attn_config": {"model_type": "", "kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {
        "layer_types": [SLIDING, FULL],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "dots3_note_text": {
        "per_layer_config": {
            layer: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "head_dim": 16,
            }
            for layer in (2, 3)
        },
    },
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 128},
    "gemma3n_text": {
        **SHARED,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": SHARED,
    "gemma4_unified_text": SHARED,
    "granitemoehybrid": {**MAMBA_2, "layer_types": [LINEAR, FULL, LINEAR], "num_hidden_layers": 3},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "full_attn_idxs": [1],
        "block_multiple_of": 8,
    },
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3},
    "llama4": {"text_config": LLAMA_4},
    "llama4_text": LLAMA_4,
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "minimax_m3_vl_text": {"layer_types": [FULL, "minimax_m3_sparse"], "index_n_heads": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local", "lsh"]},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 99,
        "shape_embed_dim": 16,
        "shape_vocab_size": 99,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        **HYBRID,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        **HYBRID,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# What a PagedCache refuses, each with words of its message.
REFUSED = {
    "blt": "takes no transformers Cache: it needs one for each of its three",
    "deepseek_v4": "keeps ordinary keys and values",  # compressed entries instead
    "falcon_mamba": "keeps ordinary keys and values",
    "mamba": "keeps ordinary keys and values",
    "mamba2": "keeps ordinary keys and values",
    "minimax": "takes no transformers Cache: .* MiniMaxCache",
    "openai-gpt": "takes no transformers Cache: it computes the whole past anew",
    "reformer": "takes no transformers Cache: it keeps hash buckets",
    "rwkv": "takes no transformers Cache: it keeps recurrent states",
    "xlnet": "takes no transformers Cache: it keeps hidden states",
    "xlstm": "takes no transformers Cache: it keeps recurrent states",
}

# What cannot run on "hf_paged", with the error it meets: tested on sdpa, where K/V are gathered.
OTHER_ATTENTION = {
    "falcon": (KeyError, "hf_paged"),  # these two look it up in a table of their own
    "gpt_neo": (KeyError, "hf_paged"),
    "minimax_m3_vl_text": (ValueError, "selects blocks of keys"),
}

# Where DynamicCache on sdpa is wrong in older versions, so that eager is what to compare with.
BASELINE = {
    "doge": "eager",  # sdpa loses causality where its mask is skipped
    "gemma2": "eager",  # sdpa ignores the softcap
    "vaultgemma": "eager",
}

# Tested on the newest transformers only, and what is wrong with older ones.
NEEDS_NEWEST = {
    "cohere_compass_text": "has another config",
    "gptj": "looks its attention up in a table of its own",
    "inkling_text": "DynamicCache does not roll its convolutions back",
    "switch_transformers": "the DynamicCache of an assistant has layers too many to be cropped",
    "umt5": "assisted decoding on a DynamicCache is not what greedy gives",
    "xlm": "takes no cache",
}

# What transformers cannot do with a model on a DynamicCache either; the suite checks that.
NOT_IN_TRANSFORMERS = {
    "prophetnet": ("prompt lookup", "conversation"),  # takes one token at a time
    "xlm": ("prompt lookup", "conversation"),  # has its mask made for a first forward
}

LEFT_OUT = {
    "dots3_note": "composite; its decoder is dots3_note_text",
    "gemma3n": "needs timm; its decoder is gemma3n_text",
    "gemma4_assistant": "reads another model's K/V and has no cache",
    "gemma4_unified_assistant": "reads another model's K/V and has no cache",
    "git": "captions images; among the multimodal models",
    "musicgen": "a decoder of audio codes, which takes no text",
    "musicgen_melody": "as musicgen",
    "qwen4_exp": "composite; its decoder is qwen4_exp_text",
}

# What the default run takes: layers and paths of every kind.
SAMPLE = (
    "llama", "gpt2", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_moe",
    "bloom", "falcon", "mpt", "gpt_bigcode", "opt", "bert", "deepseek_v3", "deepseek_v32",
    "inkling2_text", "gemma3n_text", "moshi", "dory", "jamba", "zamba", "qwen3_next", "lfm2",
    "xlnet", "mamba", "deepseek_v4",
)  # fmt: skip


def is_tested(name: str, needs_newest: Container[str] = NEEDS_NEWEST) -> bool:
    """Whether the architecture is tested with this version of transformers."""
    return name in transformers.CONFIG_MAPPING and (IS_NEWEST or name not in needs_newest)
