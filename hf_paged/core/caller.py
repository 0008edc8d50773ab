"""Who asks: a part of a model in the middle of its forward, or the model itself and others.

A forward that fails tells nobody. So what asks a cache while layers lack the tokens of a step is a
hook or a layer in its forward, or it is the beginning of the next one. The call stack tells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

_CALL = torch.nn.Module._call_impl.__code__  # what runs a module's forward and its hooks


def is_inside_model() -> bool:
    """Whether the caller is in a layer (or another part) of a model of transformers, or in a hook
    on one. The model's own forward is not: there a new forward asks what it is to go on from."""
    is_part = False
    for frame in _calls(sys._getframe(1)):
        if isinstance(frame.f_locals["self"], PreTrainedModel):
            return is_part
        is_part = True
    return False


class Given(NamedTuple):
    """What a forward was given besides the tokens, as far as it was by name.

    Attributes:
        embeddings: in place of tokens.
        position_ids: as the innermost part has got them to which they were passed on.
    """

    embeddings: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None


def given_to_model() -> Given:
    """What the forward was given that the caller is in."""
    embeddings = position_ids = None
    for frame in _calls(sys._getframe(1)):
        module, by_name = frame.f_locals["self"], frame.f_locals["kwargs"]
        if position_ids is None:
            position_ids = by_name.get("position_ids")
        if isinstance(module, PreTrainedModel):  # which may give its parts what it likes
            embeddings = by_name.get("inputs_embeds")
    return Given(embeddings, position_ids)


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    """The calls of modules on the stack, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back
