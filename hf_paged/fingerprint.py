"""What K/V depend on besides the tokens: the model, its adapters, and what the caller names.

The parts are text, each under its own name, so that two different things never make one key.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

SAMPLE = 1024  # elements of each weight whose order counts
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a config says without changing any K/V.
IRRELEVANT = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}

ExtraKey = str | int | bytes | tuple["ExtraKey", ...] | None


def config_fingerprint(config: PreTrainedConfig) -> str:
    """Text of a model's config, without what changes no K/V."""
    entries = {
        name: value
        for name, value in config.to_dict().items()
        if name not in IRRELEVANT and not name.startswith("_")
    }
    return json.dumps(entries, sort_keys=True, default=str)


class _Weight(NamedTuple):
    """A weight as it was; the tensor itself, for an address may be given to another one."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    version: float


# Of each model its weights when they were last read, and their digest.
_read: weakref.WeakKeyDictionary[torch.nn.Module, tuple[list[_Weight], str]] = (
    weakref.WeakKeyDictionary()
)


def model_fingerprint(model: torch.nn.Module) -> str:
    """Text of a model's weights and active adapters, which no other state of them has.

    The weights are read once, and again when one was written. That is told by its version, which
    PyTorch counts for all that optimizers, `load_state_dict` and in-place operations do, but not
    for what is written through `weight.data`; tensors made in inference mode have none.
    """
    weights: list[torch.Tensor] = []
    adapters = []
    for module in _modules(model):
        if module._parameters or module._buffers:
            weights += _weights(module)
        # A layer that PEFT has wrapped; models have methods of that name.
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            parts = module.active_adapters, module.disable_adapters, module.merged_adapters
            adapters.append([str(part) for part in (*parts, getattr(module, "scaling", None))])
    state, digest = _read.get(model, ([], ""))
    if not _is_state(state, weights):
        state = [_Weight(weakref.ref(w), w.data_ptr(), _version(w)) for w in weights]
        digest = _digest(model)
        _read[model] = state, digest
    return json.dumps({"weights": digest, "adapters": adapters})


def _is_state(state: list[_Weight], weights: list[torch.Tensor]) -> bool:
    if len(state) != len(weights):
        return False
    for (tensor, address, version), weight in zip(state, weights, strict=True):
        if tensor() is not weight or address != weight.data_ptr() or version != _version(weight):
            return False
    return True


def _version(weight: torch.Tensor) -> float:
    """How often it was written; of what cannot be told NaN, which is not even equal to itself."""
    return math.nan if weight.is_inference() else weight._version


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


def _modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """All modules, once each; several times as fast as `model.modules()`, for this is each call."""
    seen, stack = {model}, [model]
    while stack:
        module = stack.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of one module; not those that it can compute anew."""
    weights: list[torch.Tensor | None] = [*module._parameters.values()]
    if module._buffers:
        passing = module._non_persistent_buffers_set
        weights += [b for name, b in module._buffers.items() if name not in passing]
    return [weight for weight in weights if weight is not None]


def _digest(model: torch.nn.Module) -> str:
    """Of each weight the sum of all its bits as whole numbers, and a sample of them in order."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        for weight in _weights(module):
            if weight.is_meta:
                raise ValueError(
                    f"The weights of {name!r} are not loaded (device meta), so the pool cannot "
                    "tell its model from others; make it from the config."
                )
            flat = weight.detach().reshape(-1).contiguous()
            bits = flat.view(INTEGERS[flat.element_size()])
            step = max(1, len(bits) // SAMPLE) | 1  # odd, to run over all columns of a matrix
            sample = bits[::step].cpu().numpy().tobytes()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {_sum(bits)}".encode())
            digest.update(sample)
    return digest.hexdigest()


def _sum(bits: torch.Tensor) -> int:
    """The sum of whole numbers [n], eight bytes at a time where they can be read so."""
    width = 8 // bits.element_size()
    if bits.storage_offset() % width or bits.data_ptr() % 8:
        return int(bits.sum(dtype=torch.int64))
    whole = len(bits) // width * width
    parts = bits[:whole].view(torch.int64).sum(), bits[whole:].sum(dtype=torch.int64)
    return int(sum(parts))
