"""What a backend gets and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ..core.metadata import AttentionMetadata, Pattern
from ..core.storage import LayerStorage


@dataclass(slots=True)
class AttentionCall:
    """The attention of one layer in one step, without padding.

    New token i of all rows looks at tokens `first_visible[i]` up to and including itself of its
    own row. The step's own K/V are in `keys` and `values`; those in front of it are in the blocks.

    Attributes:
        query: [tokens, heads, head_dim].
        keys, values: the step's new states, [tokens, kv_heads, head_dim].
        storage: the layer's blocks. They hold the new states too, but for those that no later
            query can see.
        metadata: the step's index arrays.
        pattern: what the mask allows, in columns.
        first_visible: int64 [tokens], on the host.
        scaling: factor on q k^T.
        softcap: logits become softcap * tanh(logits / softcap), None for none.
        sinks: [heads] logits that take part in the softmax without a value, None for none.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    storage: LayerStorage
    metadata: AttentionMetadata
    pattern: Pattern
    first_visible: np.ndarray
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None


@runtime_checkable
class Backend(Protocol):
    """Attention that reads K/V through the block tables."""

    name: str

    def stored_dims(self, dtype: torch.dtype, key_dim: int, value_dim: int) -> tuple[int, int]:
        """The width of a head of K and V in memory, at least their head_dim."""
        ...

    def refusal(self, call: AttentionCall) -> str | None:
        """Why this backend cannot compute `call` exactly, or None if it can."""
        ...

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[tokens, heads, value_dim], in the query's dtype."""
        ...
