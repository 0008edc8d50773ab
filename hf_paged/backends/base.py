"""What a backend gets and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ..core.metadata import AttentionMetadata, LayerStates, Pattern
from ..core.storage import LayerStorage


@dataclass(slots=True)
class AttentionCall:
    """The attention of one layer in one step, without padding.

    New token i of all rows looks at tokens `first_visible[i]` up to and including itself of its
    own row. The step's own K/V are in `keys` and `values`; those in front of it are in the blocks.

    Attributes:
        query: [tokens, heads, head_dim].
        states: the layer's K/V: new ones and blocks, which hold the new ones too, but for those
            that no later query can see.
        pattern: what the mask allows, in columns.
        first_visible: int64 [tokens], on the host.
        scaling: factor on q k^T.
        softcap: logits become softcap * tanh(logits / softcap), None for none.
        sinks: [heads] logits that take part in the softmax without a value, None for none.
    """

    query: torch.Tensor
    states: LayerStates
    pattern: Pattern
    first_visible: np.ndarray
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def keys(self) -> torch.Tensor:
        """The step's new keys, [tokens, kv_heads, head_dim]."""
        return self.states.token_keys

    @property
    def values(self) -> torch.Tensor:
        """The step's new values, [tokens, kv_heads, head_dim]."""
        return self.states.token_values

    @property
    def value_dim(self) -> int:
        return self.states.values.shape[3]

    @property
    def storage(self) -> LayerStorage:
        """The layer's blocks."""
        return self.states.storage

    @property
    def metadata(self) -> AttentionMetadata:
        """The step's index arrays."""
        return self.states.metadata


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
