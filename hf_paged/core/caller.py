"""Who asks: a part of a model in the middle of its forward, or the model itself and others.

A forward that fails tells nobody. So what asks a cache while layers lack the tokens of a step is a
hook or a layer in its forward, or it is the beginning of the next one. The call stack tells.
"""

from __future__ import annotations

import sys
import threading
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


def autocast_dtype() -> str | None:
    """What autocast computes in where it is on, for the thread that asks."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    dtypes = [str(torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
    return " ".join(dtypes) or None


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    """The calls of modules on the stack, the innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back


class ForwardWatch:
    """Whose forward is under way on a cache.

    It is that of the thread that began it, until that thread asks from outside of the model's
    parts: then the forward has failed, whoever asks next.
    """

    def __init__(self) -> None:
        self._thread, self._was_left = threading.current_thread(), False

    def begin(self) -> None:
        """This thread runs a forward, or goes on with one."""
        self._thread, self._was_left = threading.current_thread(), False

    @property
    def is_here(self) -> bool:
        """Whether the caller is in that forward."""
        if self._thread is not threading.current_thread():
            return False
        self._was_left = self._was_left or not is_inside_model()
        return not self._was_left

    @property
    def elsewhere(self) -> str | None:
        """The name of another thread that runs it, None if this one does, or did until it ended."""
        thread = self._thread
        is_other = thread is not threading.current_thread() and thread.is_alive()
        return thread.name if is_other else None

    def check_thread(self) -> None:
        """Raise RuntimeError while another thread runs it."""
        if self.elsewhere is not None:
            raise RuntimeError(
                f"{self.elsewhere} is in the middle of a step of this PagedCache, or its forward "
                "has failed there; give each thread a fork(), and free() a cache whose forward "
                "failed in another thread."
            )
