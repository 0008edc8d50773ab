"""What K/V depend on besides the tokens: the model, its adapters, and what the caller names.

The parts are text, each under its own name, so that two different things never make one key.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedConfig

SAMPLE = 1024  # elements of each weight that are looked at
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

    Of each weight `SAMPLE` elements are read, spread over it, which tells two checkpoints apart
    and a training step, but not a change of a few single elements.
    """

    def __init__(self) -> None:
        self._state: list[Any] = []
        self._weights = ""

    def of(self, model: torch.nn.Module) -> str:
        state, adapters = [], []
        for module in model.modules():
            for weight in (*module._parameters.values(), *module._buffers.values()):
                if weight is not None:
                    version = 0 if weight.is_inference() else weight._version
                    state.append((id(weight), weight.data_ptr(), version))
            # A layer that PEFT has wrapped; models have methods of that name.
            if isinstance(getattr(type(module), "disable_adapters", None), property):
                adapters.append([str(module.active_adapters), str(module.disable_adapters)])
        if state != self._state or not self._weights:
            self._state, self._weights = state, _sampled(model)
        return json.dumps({"weights": self._weights, "adapters": adapters})


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


def _sampled(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
