"""Models that the tests share: the small real one, and tiny random ones by architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from examples import small_model
from hf_paged import BlockPool, PagedCache  # registers the attention implementation

# Tiny models lose by a second one, and tests run in several processes; test_attention.py has two.
torch.set_num_threads(1)

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
# Architectures whose layers differ in what they look back on; each with what is special to it.
TINY = {
    "llama": {},
    "mistral": {"sliding_window": 8},  # windows only
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "llama4_text": {  # chunks
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", FULL, "chunked_attention", FULL],
        "no_rope_layers": [1, 0, 1, 0],
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
}


def tiny(model_type: str, **overrides: object) -> PreTrainedModel:
    """A random model of an architecture in TINY; its weights are large enough to tell tokens."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **TINY[model_type], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def two_layer_config(window: int) -> Gemma3TextConfig:
    """Two layers of one head of two numbers; the first sees everything, the other a window."""
    return Gemma3TextConfig(
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        hidden_size=2,
        sliding_window=window,
        layer_types=[FULL, SLIDING],
    )


def check_used(pool: BlockPool, caches: Iterable[PagedCache]) -> None:
    """Raise AssertionError unless the blocks that these hold, all caches of the pool, are those
    that it says are used, with full attention those of known tokens in front of them too (in the
    tree of another key than the cache's these may be others). With several layer groups there may
    be more: what is known of a block's tokens is evicted in all groups at once, so it stays while
    one of them has it in use."""
    tables = [cache.state.tables for cache in caches]
    for index, (group, evictable) in enumerate(
        zip(pool.groups, pool.index.evictable(), strict=True)
    ):
        held = {int(block) for table in tables for block in table.held(index)}
        needed = set(held)
        for _, path in pool.index.paths() if group.window is None else ():
            blocks = [node.blocks[index] for node in path]
            last = max((at for at, block in enumerate(blocks) if block in held), default=0)
            needed.update(block for block in blocks[:last] if block >= 0)
        used = group.num_used - evictable
        assert used == len(needed) or (used > len(held) and len(pool.groups) > 1), (
            f"{group}: caches need {len(needed)} blocks, the pool says that {used} are used"
        )


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """Builds each tiny architecture once."""
    built: dict[str, PreTrainedModel] = {}

    def get(model_type: str) -> PreTrainedModel:
        if model_type not in built:
            built[model_type] = tiny(model_type)
        return built[model_type]

    return get


@pytest.fixture(scope="session")
def real() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer."""
    return small_model.load()


@pytest.fixture(scope="session")
def text() -> str:
    """English text that needs no hub."""
    return small_model.sample_text()


def ragged_ids(lengths: list[int], vocab: int = 99, seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch of random ids, of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, vocab, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
