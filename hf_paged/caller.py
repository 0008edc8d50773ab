"""Who asks: a part of a model in the middle of its forward, or the model itself and others.

A forward that fails tells nobody. So what asks a cache while layers lack the tokens of a step is a
hook or a layer in its forward, or it is the beginning of the next one. The call stack tells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

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


def is_on_embeddings() -> bool:
    """Whether the model that the caller is in was given embeddings in place of tokens."""
    given: dict[str, Any] = {}
    for frame in _calls(sys._getframe(1)):  # a model may give its parts what it likes
        if isinstance(frame.f_locals["self"], PreTrainedModel):
            given = frame.f_locals["kwargs"]
    return given.get("inputs_embeds") is not None


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    """The calls of modules on the stack, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back
