"""What K/V depend on besides the tokens: the model, its adapters, and what the caller names.

The parts are text, each under its own name, so that two different things never make one key.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from operator import attrgetter
from typing import Any

import torch
from transformers import PreTrainedConfig

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a config says without changing any K/V.
IRRELEVANT = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "use_cache", "initializer_range", "task_specific_params"),
    *("id2label", "label2id", "num_labels", "problem_type", "return_dict"),
    *("output_attentions", "output_hidden_states", "attention_dropout", "hidden_dropout"),
}

_version = attrgetter("_version")

ExtraKey = str | int | bytes | tuple["ExtraKey", ...] | None


def config_fingerprint(config: PreTrainedConfig) -> str:
    """Text of a model's config, without what changes no K/V."""
    entries = {
        name: value
        for name, value in config.to_dict().items()
        if name not in IRRELEVANT and not name.startswith("_")
    }
    return json.dumps(entries, sort_keys=True, default=str)


class _State:
    """A model as it was when its weights were read; it keeps no part of it alive."""

    def __init__(self, model: torch.nn.Module):
        modules, self._tree, weights = _parts(model)
        self._died: list[Any] = []  # with all alive, no other has the address of one
        self._alive = [weakref.ref(weight, self._died.append) for weight in weights]
        self._addresses = list(map(id, weights))
        self._places = _places(weights)
        # Layers that PEFT has wrapped; models have methods of that name.
        self._adapters = [
            weakref.ref(module)
            for module in modules
            if isinstance(getattr(type(module), "disable_adapters", None), property)
        ]
        self.digest = _digest(model)

    def is_current(self, model: torch.nn.Module) -> bool:
        """Whether the model still has the same weights in the same places, none written since."""
        _, tree, weights = _parts(model)
        return (
            not self._died
            and tree == self._tree
            and list(map(id, weights)) == self._addresses
            and self._places is not None
            and _places(weights) == self._places
        )

    def adapters(self) -> list[list[str]]:
        """Of each wrapped layer what it now adds to its output."""
        layers: list[Any] = [layer() for layer in self._adapters]
        parts = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
        return [[str(getattr(layer, part, None)) for part in parts] for layer in layers]


# Each model as it was when its weights were last read.
_read: weakref.WeakKeyDictionary[torch.nn.Module, _State] = weakref.WeakKeyDictionary()


def model_fingerprint(model: torch.nn.Module) -> str:
    """Text of a model's weights and active adapters, which no other state of them has.

    The weights are read once, and again when one was written. That is told by its version, which
    PyTorch counts for all that optimizers, `load_state_dict` and in-place operations do, but not
    for what is written through `weight.data`; tensors made in inference mode have none.
    """
    state = _read.get(model)
    if state is None or not state.is_current(model):
        state = _read[model] = _State(model)
    return json.dumps({"weights": state.digest, "adapters": state.adapters()})


def encode_extra_key(extra_key: ExtraKey) -> str:
    """Text that is different for different keys.

    Raises:
        ValueError: the key is not None, text, an int, bytes, or a tuple of these.
    """
    return json.dumps(_tagged(extra_key))


def _tagged(key: Any) -> dict[str, Any]:
    if key is None or (isinstance(key, str | int) and not isinstance(key, bool)):
        return {type(key).__name__: key}
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, tuple):
        return {"tuple": [_tagged(part) for part in key]}
    raise ValueError(
        f"extra_key must be text, an int, bytes, or a tuple of these, not {key!r}; name what the "
        "K/V depend on by one of them."
    )


# This is asked at each call, behind a forward that leaves nothing in the processor's caches: each
# module is looked at once, and as little of it as can be.
def _parts(model: torch.nn.Module) -> tuple[list[Any], list[int], list[torch.Tensor]]:
    """All modules from the top down, the children of each that has some, and their weights."""
    modules: list[Any] = [model]
    tree, weights = [], []
    for module in modules:  # grows on the way
        if children := module._modules:
            tree.append(len(children))
            modules += filter(None, children.values())
        if parameters := module._parameters:
            weights += parameters.values()
        if module._buffers:
            weights += _lasting_buffers(module)
    return modules, tree, [weight for weight in weights if weight is not None]


def _lasting_buffers(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """The buffers of a module but those that it can compute anew."""
    passing = module._non_persistent_buffers_set
    return [buffer for name, buffer in module._buffers.items() if name not in passing]


def _places(weights: list[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Where each weight is and how often it was written; None if one does not tell."""
    try:
        return list(map(torch.Tensor.data_ptr, weights)), list(map(_version, weights))
    except RuntimeError:
        return None


def _digest(model: torch.nn.Module) -> str:
    """Of all bits of each weight, which stands at which place."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        for weight in (*module._parameters.values(), *_lasting_buffers(module)):
            if weight is None:
                continue
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            try:
                parts = [part.cpu().numpy() for part in _sums(weight.detach())]
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"The weights of {name!r} ({type(weight).__name__} on {weight.device}) cannot "
                    "be read, so the pool cannot tell its model from others; make it from the "
                    "config."
                ) from error
            for part in parts:
                digest.update(part.tobytes())
    return digest.hexdigest()


def _sums(weight: torch.Tensor) -> list[torch.Tensor]:
    """The bits as a square of whole numbers: the sums of its rows and columns, and what is left.

    No number can change its place with another one unseen, for at least one of the two sums of each
    changes. Eight bytes are one number, where they can be read so.
    """
    flat = weight.reshape(-1).contiguous()
    bits = flat.view(INTEGERS[flat.element_size()])
    width = 8 // bits.element_size()
    whole = (
        0 if bits.storage_offset() % width or bits.data_ptr() % 8 else len(bits) // width * width
    )
    words, left = (bits[:whole].view(torch.int64), bits[whole:]) if whole else (bits, bits[:0])
    side = math.isqrt(len(words))
    square = words[: side * side].view(side, side)
    sums = [square.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return [*sums, words[side * side :], left]
