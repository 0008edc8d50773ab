"""What a forward runs under besides tokens and weights: autocast, training, forward hooks."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

# Whose hooks move tensors or copy them: what they return are the same states.
HARMLESS = ("torch.distributed.", "transformers.")
# Modules that say by `training` whether chance has a part in what they compute.
IN_TRAINING = (PreTrainedModel, _DropoutNd)


class Watched(NamedTuple):
    """What of a model to look at in each step.

    Attributes:
        hooks: the tables of its forward hooks, and those of all modules there are.
        training: the modules that compute something else while they are in training.
    """

    hooks: list[dict[int, Callable[..., Any]]]
    training: list[torch.nn.Module]


def watched(modules: list[torch.nn.Module]) -> Watched:
    """What to look at of a model of these modules."""
    hooks: list[Any] = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    training: list[torch.nn.Module] = []
    for module in modules:
        hooks += module._forward_pre_hooks, module._forward_hooks
        if isinstance(module, IN_TRAINING):
            training.append(module)
    return Watched(hooks, training)


def may_change_states(watched: Watched) -> bool:
    """Whether the model is in training, or a hook returns something or writes to a tensor.

    A hook that writes through an index (`output[0][:] = ...`) and returns nothing looks like one
    that keeps what it is given.
    """
    hooks, training = watched
    return any(module.training for module in training if getattr(module, "p", 1)) or (
        any(hooks) and not all(_looks_on(hook) for table in hooks for hook in table.values())
    )


def _looks_on(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    hook = inspect.unwrap(hook)
    if str(getattr(hook, "__module__", "")).startswith(HARMLESS):
        return True
    code = getattr(hook if inspect.isroutine(hook) else type(hook).__call__, "__code__", None)
    return code is not None and _returns_nothing(code) and not _names_writing(code)


@lru_cache(maxsize=1024)
def _returns_nothing(code: CodeType) -> bool:
    """Whether each `return` of a function is that of the constant None."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("RETURN_"):
            value = instruction if instruction.opname == "RETURN_CONST" else before
            is_none = "CONST" in value.opname and value.argval is None
            if not is_none or (value is before and instruction.is_jump_target):
                return False
        before = instruction
    return True


def _names_writing(code: CodeType) -> bool:
    """Whether a function uses a name such as torch has for what writes: add_, copy_, ..."""
    names = (name for name in code.co_names if name != "requires_grad_")
    return any(name.endswith("_") and not name.endswith("__") for name in names)
