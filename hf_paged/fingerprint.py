"""What K/V depend on besides the tokens: the model, its adapters, and what the caller names.

The parts are text, each under its own name, so that two different things never make one key.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

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


class ModelFingerprint:
    """The weights of a model and its active adapters; computed anew when a weight was written.

    That a weight was written is told by its version, which PyTorch counts for all that optimizers,
    `load_state_dict` and in-place operations do. Writing through `weight.data` is not counted.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Any], str] = ([], "")

    def of(self, model: torch.nn.Module) -> str:
        """Text that another checkpoint, or another state of the adapters, does not have."""
        state: list[Any] = []
        adapters = []
        has_versions = True
        for module in model.modules():
            for weight in _weights(module):
                if weight.is_inference():
                    has_versions = False
                else:
                    state.append((id(weight), weight.data_ptr(), weight._version))
            # A layer that PEFT has wrapped; models have methods of that name.
            if isinstance(getattr(type(module), "disable_adapters", None), property):
                parts = module.active_adapters, module.disable_adapters, module.merged_adapters
                adapters.append([str(part) for part in (*parts, getattr(module, "scaling", None))])
        known, weights = self._last
        if state != known or not has_versions or not weights:
            weights = _digest(model)
            self._last = state, weights
        return json.dumps({"weights": weights, "adapters": adapters})


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


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of one module; not those that it can compute anew."""
    passing = module._non_persistent_buffers_set
    buffers = (b for name, b in module._buffers.items() if name not in passing)
    return [w for w in (*module._parameters.values(), *buffers) if w is not None]


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
            parts = bits.sum(dtype=torch.int64), bits[::step].cpu().numpy().tobytes()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {int(parts[0])}".encode())
            digest.update(parts[1])
    return digest.hexdigest()
