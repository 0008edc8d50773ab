"""What K/V depend on besides the tokens: the model, its adapters, and what the caller names.

The parts are text, each under its own name, so that two different things never make one key.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterable
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
        modules = list(model.modules())
        weights = _weights(modules)
        self._modules = [weakref.ref(module) for module in modules]
        self._children = _children(modules)
        self._weights = [weakref.ref(weight) for weight in weights]
        self._places = _places(weights)
        # Layers that PEFT has wrapped; models have methods of that name.
        self._adapters = [
            weakref.ref(module)
            for module in modules
            if isinstance(getattr(type(module), "disable_adapters", None), property)
        ]
        self.digest = _digest(model)

    def is_current(self) -> bool:
        """Whether the model still has the same modules and weights, and none was written since."""
        modules = [module() for module in self._modules]
        if None in modules or _children(modules) != self._children:
            return False
        weights = _weights(modules)
        return (
            len(weights) == len(self._weights)
            and all(then() is now for then, now in zip(self._weights, weights, strict=True))
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
    if state is None or not state.is_current():
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


# This is asked at each call, behind a forward that leaves nothing in the processor's caches, so all
# modules are looked at together, in as few steps as can be.
def _children(modules: Iterable[Any]) -> list[list[int]]:
    """The children of each module, by their addresses: they can be compared while they live."""
    return [list(map(id, module._modules.values())) for module in modules]


def _weights(modules: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters and buffers of modules; not those that they can compute anew."""
    weights = [weight for module in modules for weight in module._parameters.values()]
    for module in modules:
        if module._buffers:
            passing = module._non_persistent_buffers_set
            weights += [b for name, b in module._buffers.items() if name not in passing]
    return [weight for weight in weights if weight is not None]


def _places(weights: Iterable[torch.Tensor]) -> list[tuple[int, int]] | None:
    """Where each weight is and how often it was written; None if one does not tell."""
    try:
        return [(weight.data_ptr(), weight._version) for weight in weights]
    except RuntimeError:
        return None


def _digest(model: torch.nn.Module) -> str:
    """Of all bits of each weight, which stands at which place."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        for weight in _weights([module]):
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
