"""What stands in for K/V and for the mask between transformers and our attention function.

A `PagedView` has the logical shape of a layer's keys or values and holds no data; a `LazyMask` has
the shape of an attention mask and is not built. Our attention function recognises both. Any other
code that touches one gets an ordinary tensor: it *densifies*. So what a model does with its keys,
values or mask never decides whether the result is right, only whether it is fast.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from .backends import Backend
from .core.forward import CacheState
from .core.metadata import AttentionMetadata, LayerStates, MaskFacts, Step
from .core.model_spec import READ_BY_MODEL, ModelSpec, advise, other_attention
from .core.storage import gather

PAGED, COMPILED = "paged", "torch.compile"  # ways of an attention call


class KVLength(int):
    """`kv_length` as `Cache.get_mask_sizes` returns it: an int that knows whose length it is.

    transformers hands it to the mask function unchanged, which so learns of the cache.
    """

    state: CacheState
    reader: Reader

    def __new__(cls, length: int, state: CacheState, reader: Reader) -> KVLength:
        self = super().__new__(cls, length)
        self.state, self.reader = state, reader
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


class Traced:
    """The K/V that the last layer of a forward that is being compiled has handed on.

    Attributes:
        states: (keys, values, the number of the cache, the layer), None once they were read.
    """

    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None = None


TRACED = Traced()


@dataclass
class Calls:
    """Attention calls of a cache: through the block tables, gathered first, by reason, and how many
    of all came from compiled forwards."""

    paged: int = 0
    dense: Counter[str] = field(default_factory=Counter)
    compiled: int = 0


class Reader:
    """Who reads the K/V of a cache, and which way it was done.

    Args:
        spec: what the model's config says.
        backend: the attention backend to use, or its name.
        may_compile: whether generate may compile decode steps.

    Attributes:
        config: the one in which the model looks up its attention implementation.
        calls: how often the layers were read which way.
        is_compiling: set when compiled code makes the mask of the step that comes.
        is_prepared: whether the mask of a decode step has been made for a compiled forward, in
            which a layer's attention is one operator.
        columns: int64 [], the columns in front of that step.
        token: what stands for the masks of such a step in a graph, of a size that never changes.
    """

    def __init__(self, spec: ModelSpec, backend: str | Backend, may_compile: bool):
        self.config, self.backend, self.calls = spec.attending, backend, Calls()
        self.may_compile, self._stateful_layers = may_compile, spec.stateful_layers
        self._decoder = spec.config
        self.is_compiling = False
        self.is_prepared, self.columns = False, torch.zeros((), dtype=torch.long, device="cpu")
        # Whether a layer's K/V went another way than once into our attention function.
        self._is_irregular = False
        self.token: torch.Tensor | None = None
        self._masks: dict[tuple[int, int], LazyMask] = {}
        self._step: Step | None = None
        self._gathered: str | None = None  # why K/V of this step are no views
        self._is_compiled = False  # whether compiled code has made its mask, an ordinary one

    @property
    def eager_reason(self) -> str | None:
        """Why decode steps are not compiled, None if generate may compile them."""
        if not self.may_compile:
            return "compile=True was not asked for"
        if self._stateful_layers:
            return f"layers {self._stateful_layers} keep other states than K/V"
        if "chunked_attention" in (getattr(self._decoder, "layer_types", None) or ()):
            return "chunked attention, which transformers itself does not compile"
        if self._is_irregular:
            return "the model reads K/V itself, or several times"
        return other_attention(self.config)

    def stand_in(self, mask: LazyMask) -> torch.Tensor:
        """A tensor without elements in place of a decode step's mask: whatever reads it fails."""
        facts, token = mask.facts, self.token
        if token is None or len(token) != facts.rows or token.device != mask.device:
            shape = facts.rows, 1, 1, 0
            self.token = token = torch.zeros(shape, dtype=torch.bool, device=mask.device)
        if any(other.facts.past != facts.past for other in self._masks.values()):
            self._masks = {}
        self._masks[facts.kv_length, facts.kv_offset] = mask
        self.is_prepared = True
        self.columns.fill_(facts.past)
        return token

    def note_way(self, way: str, before: str | None) -> None:
        """Look at how K/V were read, after they were read `before` in another way, or not yet."""
        self._is_irregular |= before is not None or way == READ_BY_MODEL

    def mask_for(
        self, metadata: AttentionMetadata, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The mask that `mask` stands for in the layers of a group."""
        if mask is None or mask is not self.token:
            return mask
        return self._masks[metadata.kv_length, metadata.kv_offset]

    def show(
        self, states: LayerStates, gathered: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's (keys, values): views where our attention function reads them.

        Args:
            gathered: why they must be ordinary tensors, if not for what the config says.
        """
        step = states.metadata.step
        if step is not self._step:
            self._gathered = other_attention(self.config) if step.mask is None else None
            self._is_compiled, self.is_compiling = self.is_compiling, False
            self._step = step
        if gathered is None and self._gathered is not None:
            gathered = self._gathered
            advise(gathered)
        pages = LayerPages(states, self, self._is_compiled)
        return pages.views() if gathered is None else pages.tensors(gathered)


@dataclass(slots=True, eq=False)
class LayerPages:
    """What the views of a layer's keys and values have in common.

    Attributes:
        states: the layer's K/V in one step.
        reader: who reads the layers of this cache.
        is_compiled: whether compiled code has made the mask, an ordinary one.
        counted: which way the last attention call on them went.
    """

    states: LayerStates
    reader: Reader
    is_compiled: bool
    counted: str | None = None

    def count(self, way: str) -> None:
        """Count an attention call: PAGED, or why the states are gathered first."""
        self.reader.note_way(way, self.counted)
        if self.counted == READ_BY_MODEL:
            return  # they were gathered before it, and that is counted
        self.counted = way
        if way == PAGED:
            self.reader.calls.paged += 1
        else:
            self.reader.calls.dense[way] += 1

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) without data, for whatever can read blocks or densifies them."""
        keys, values, storage = self.states.keys, self.states.values, self.states.storage
        return (
            without_gradient(keys, PagedView.of, self, keys, storage.keys),
            without_gradient(values, PagedView.of, self, values, storage.values),
        )

    def tensors(self, reason: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The same (keys, values) as ordinary tensors, and why."""
        self.count(reason)
        keys, values, storage = self.states.keys, self.states.values, self.states.storage
        return (
            without_gradient(keys, self.dense, keys.detach(), storage.keys),
            without_gradient(values, self.dense, values.detach(), storage.values),
        )

    def dense(self, new: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, kv_length, head_dim]: the past gathered from `blocks`, then `new`."""
        metadata = self.states.metadata
        if not metadata.step.is_current:
            raise RuntimeError("These keys or values belong to an earlier step and are gone.")
        past = metadata.kv_length - new.shape[2]
        if past == 0:
            return new.contiguous()  # as a view is; a model may have asked for new strides
        states = gather(blocks, metadata.past_slots(past)).to(new.dtype)
        return torch.cat([states, new], dim=2)


class Densifying(torch.Tensor):
    """A tensor that becomes an ordinary one where anything reads it, and that nothing can write."""

    # The C++ default skips subclass handling that we do not need: every op reaches the dispatch.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    refusal: str  # what is said to who writes to it, or to a part of it

    def densify(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written, is_view = _effects(func)
        for at, name in written:
            _check_written(args[at] if at < len(args) else kwargs.get(name))
        result = func(*_dense(args), **{name: _dense(value) for name, value in kwargs.items()})
        if is_view and isinstance(args[0], Densifying):
            return _read_only(result, args[0].refusal)
        return result

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, states: torch.Tensor) -> None:
        raise RuntimeError(self.refusal)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # the default would densify
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.densify().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.densify(), memo)

    def tolist(self) -> list[Any]:
        return self.densify().tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        array = self.densify().numpy(force=force)
        array.flags.writeable = False
        return array


def _dense(value: Any) -> Any:
    """`value`, an argument of an operation, without tensors of ours."""
    if isinstance(value, Densifying):
        return value.densify()
    return type(value)(map(_dense, value)) if isinstance(value, list | tuple) else value


@cache
def _effects(func: Any) -> tuple[list[tuple[int, str]], bool]:
    """The arguments that an operation writes to, by place and name; whether it returns a view."""
    schema = func._schema
    written = [(at, arg.name) for at, arg in enumerate(schema.arguments) if arg.is_write]
    return written, not written and any(value.alias_info for value in schema.returns)


def _check_written(value: Any) -> None:
    """Raise RuntimeError if an argument that is written to is, or has, a tensor of ours."""
    for tensor in value if isinstance(value, list | tuple) else (value,):
        if isinstance(tensor, Densifying):
            raise RuntimeError(tensor.refusal)


def _read_only(views: Any, refusal: str) -> Any:
    """The result of an operation, a tensor or several, as what cannot be written to."""
    if isinstance(views, torch.Tensor):
        return ReadOnly(views, refusal)
    return type(views)(_read_only(view, refusal) for view in views)


def no_writes(layer: int | str = "layer") -> str:
    """What is said to who writes to K/V of a layer that were read out of a cache."""
    return (
        "What is written to K/V that were read out of a PagedCache would never reach its blocks; "
        f"change the cache by `with cache.edit({layer}) as (keys, values): ...`, or a clone() for "
        "yourself."
    )


class ReadOnly(Densifying):
    """A copy, or a part of one, in which a change would be lost: so it cannot be written to.

    To all that reads it is an ordinary tensor, and what is computed from it is one. Parts of it
    (slices and other views) are as it is.
    """

    _states: torch.Tensor

    @staticmethod
    def __new__(cls, states: torch.Tensor, refusal: str) -> ReadOnly:
        copied = torch.Tensor._make_subclass(cls, states)
        copied._states, copied.refusal = states, refusal
        return copied

    def densify(self) -> torch.Tensor:
        return self._states

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self._states)


class PagedView(Densifying):
    """Keys or values of a layer: [rows, kv_heads, columns, head_dim]."""

    refusal = no_writes()
    pages: LayerPages
    _new: torch.Tensor
    _blocks: torch.Tensor
    _dense: torch.Tensor | None

    @classmethod
    def of(cls, pages: LayerPages, new: torch.Tensor, blocks: torch.Tensor) -> PagedView:
        """The view of `blocks` that the new states end."""
        # To call the class itself takes torch twice as long.
        rows, heads, _, dim = new.shape
        shape = rows, heads, pages.states.metadata.kv_length, dim
        view = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        view.pages, view._new, view._blocks, view._dense = pages, new, blocks, None
        return view

    def densify(self) -> torch.Tensor:
        if self._dense is None:
            if self.pages.counted is None:
                self.pages.count(READ_BY_MODEL)
            self._dense = self.pages.dense(self._new.detach(), self._blocks)
        return self._dense


class LazyMask(Densifying):
    """An attention mask [rows, 1, queries, columns], True where a query may look.

    Where models add it to their scores it is of their dtype instead: 0 where a query may look.

    Attributes:
        facts: what our mask function knows of it.
    """

    refusal = "A mask is built where it is read, so a change would be lost; write into a clone()."
    facts: MaskFacts
    _build: Callable[[], Any]

    @staticmethod
    def __new__(
        cls,
        facts: MaskFacts,
        dtype: torch.dtype,
        device: torch.device | str,
        build: Callable[[], Any],
    ) -> LazyMask:
        shape = (facts.rows, 1, facts.queries, facts.kv_length)
        mask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        mask.facts, mask._build = facts, build
        return mask

    def contiguous(self, *args: Any, **kwargs: Any) -> LazyMask:
        """Itself: nothing is built yet."""
        return self

    def densify(self) -> torch.Tensor:
        self.facts.is_read = True
        return self._build()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        target = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and target.get("device") is not None
            and target.get("dtype") in (None, args[0].dtype)
        ):
            return args[0]._on(target["device"])  # as accelerate does between two devices
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _on(self, device: torch.device) -> LazyMask:
        return LazyMask(self.facts, self.dtype, device, lambda: self.densify().to(device))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Any, *args: Any) -> torch.Tensor:
        return make(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "A PagedCache keeps K/V without their gradients; train with use_cache=False or with a "
            "DynamicCache."
        )


def without_gradient(
    anchor: torch.Tensor, make: Callable[..., torch.Tensor], *args: Any
) -> torch.Tensor:
    """The tensor `make(*args)`; a backward pass that reaches it raises a RuntimeError."""
    if anchor.requires_grad and torch.is_grad_enabled():
        return _NoGradient.apply(anchor, make, *args)
    return make(*args)
