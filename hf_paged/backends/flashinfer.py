"""Attention on CUDA: FlashInfer's kernels, which walk the block table.

A step is planned once for all layers of one geometry: which pages of K/V each request reads
(pages.py).

Rows that begin with the same blocks (beams, samples) read those once: one pass over the shared
blocks with the queries of all rows, one over the rest, merged by log-sum-exp (cascade inference;
Ye et al., "FlashInfer", 2025; Juravsky et al., "Hydragen", 2024).

New K/V are in the blocks before attention runs: the pool writes them by index, as FlashInfer's own
append takes some head dims only and cannot leave a token out. Nothing here reads from the device,
so that the host can run ahead of it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..core.model_spec import dtype_name
from ..core.transfer import pinned
from .base import AttentionCall
from .pages import Pages, Requests, Unstored, block_pages, requests_of, slot_pages

logger = logging.getLogger("hf_paged")

FOLDER_HINT = "; set FLASHINFER_WORKSPACE_BASE to a folder that can be written."
HEAD_DIMS = (64, 128, 256)  # what all kernels are made for; others are padded
QUERY_DTYPES = (torch.float16, torch.bfloat16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MIN_CAPABILITY = (8, 0)
# From this many query heads a K/V head on, decoding on tensor cores wins.
TENSOR_CORE_GROUP = 4
WORKSPACE_BYTES = 128 << 20  # FlashInfer's advice; partial results of rows that it splits
# Wrappers of a kind on a stream; the host gets about so many plans ahead of the device.
MAX_WRAPPERS = 4
# K/V bytes that a layer must not read twice for a cascade to pay: at some TB/s they take as long as
# the two launches that it adds.
CASCADE_MIN_BYTES = 32 << 20
CASCADE_MIN_SHARE = 0.25  # ... and their share of all that is read without one
MERGE_MAX_ELEMENTS = 8192  # heads * head_dim that the merge kernel has threads for


class FlashInferBackend:
    """FlashInfer's paged decode and prefill, in float16 and bfloat16, K/V also in 8 bits."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int], _Stream] = {}
        self._lock = threading.Lock()
        self._failures: dict[tuple[Any, ...], str] = {}

    def is_installed(self) -> bool:
        return importlib.util.find_spec("flashinfer") is not None

    def unavailable(self, device: torch.device) -> str | None:
        """Why FlashInfer does not run on `device`, or None if it does."""
        if device.type != "cuda" or torch.version.hip is not None:
            return f"FlashInfer needs CUDA, and the K/V are on {device.type}"
        return _unavailable(device)

    def stored_dims(self, dtype: torch.dtype, key_dim: int, value_dim: int) -> tuple[int, int]:
        """One width for both, of which there are kernels; what has no kernel is not padded."""
        dim = next((dim for dim in HEAD_DIMS if dim >= max(key_dim, value_dim)), None)
        if dim is None or dtype not in QUERY_DTYPES:
            return key_dim, value_dim
        return dim, dim

    def refusal(self, call: AttentionCall) -> str | None:
        """Dtypes and head dims without a kernel, and plans that FlashInfer refuses."""
        dtype, stored = call.query.dtype, call.storage.keys.dtype
        if dtype not in QUERY_DTYPES:
            return f"{dtype_name(dtype)}, for which FlashInfer has no kernel"
        if stored not in (dtype, *FLOAT8_DTYPES):
            return f"K/V stored in {dtype_name(stored)}, for which FlashInfer has no kernel"
        dims = {call.storage.padded_keys.shape[3], call.storage.padded_values.shape[3]}
        if len(dims) > 1 or not dims <= set(HEAD_DIMS):
            if max(dims) > max(HEAD_DIMS):
                return f"a head_dim of {max(dims)}, above {max(HEAD_DIMS)}"
            return "K/V stored by another backend, without FlashInfer's padding"
        return self._failures.get(_geometry(call)) or self._plan_failure(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return _plan_of(call, self._stream(call.query.device)).run(call)

    def _stream(self, device: torch.device) -> _Stream:
        """What wrappers on the current stream of `device` share."""
        is_cuda = device.type == "cuda"
        key = device, torch.cuda.current_stream(device).cuda_stream if is_cuda else 0
        with self._lock:
            if key not in self._streams:
                self._streams[key] = _Stream(device)
            return self._streams[key]

    def _plan_failure(self, call: AttentionCall) -> str | None:
        """Plan the call; what FlashInfer refuses once, such as for want of nvcc, stays refused."""
        try:
            _plan_of(call, self._stream(call.query.device))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = f"FlashInfer failed with {type(error).__name__}"
            hint = FOLDER_HINT if isinstance(error, OSError) else ""
            logger.warning("%s, K/V are gathered instead: %s%s", reason, error, hint)
            self._failures[_geometry(call)] = reason
            return reason
        return None


@cache
def _unavailable(device: torch.device) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install flashinfer-python)"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than FlashInfer's kernels (compute capability 8.0)"
    return None


class _Plan:
    """What all layers of one geometry do in one step."""

    def __init__(self, call: AttentionCall, stream: _Stream):
        self._passes: list[_Pass] = []
        self._unstored: Unstored | None = None
        if not len(call.query):
            return
        metadata, requests = call.metadata, requests_of(call)
        size = metadata.block_size
        if not metadata.stores_all:
            self._unstored = Unstored(metadata, requests, call.query.device)
            pages = self._unstored.pages
        elif metadata.step.hidden is not None or (
            requests.window is None and (requests.first % size).any()
        ):
            pages = slot_pages(metadata, requests)
        else:
            split = _cascade(call, requests)
            if split is not None:
                shared, rest = split
                self._passes.append(_Pass(call, stream, *shared, is_causal=False))
                self._passes.append(_Pass(call, stream, *rest))
                return
            pages = block_pages(metadata, requests.row, requests.first, requests.stop)
        self._passes.append(_Pass(call, stream, requests, pages))

    def run(self, call: AttentionCall) -> torch.Tensor:
        value_dim = call.value_dim
        if not self._passes:
            return call.query.new_empty((0, call.query.shape[1], value_dim))
        storage = call.storage
        dim = storage.padded_keys.shape[3]
        query = _padded(call.query, dim).contiguous()
        memory: tuple[torch.Tensor, ...] = (storage.padded_keys, storage.padded_values)
        if self._unstored is not None:
            memory = tuple(
                _padded(self._unstored.states(slots, new), dim)
                for slots, new in (
                    (storage.key_slots, call.keys),
                    (storage.value_slots, call.values),
                )
            )
        has_lse = call.sinks is not None or len(self._passes) > 1
        out, lse = self._passes[0].run(query, memory, has_lse)
        for other in self._passes[1:]:
            out, lse = _merge(out, lse, *other.run(query, memory, has_lse))
        if call.sinks is not None:
            out = _with_sinks(out, lse, call.sinks)
        return out[..., :value_dim]


class _Pass:
    """One planned kernel: a wrapper that serves this plan alone until the plan is gone."""

    def __init__(
        self,
        call: AttentionCall,
        stream: _Stream,
        requests: Requests,
        pages: Pages,
        is_causal: bool = True,
    ):
        heads, kv_heads = call.query.shape[1], call.keys.shape[1]
        kv_dtype = call.storage.keys.dtype if call.metadata.stores_all else call.query.dtype
        dim = call.storage.padded_keys.shape[3]
        geometry = (heads, kv_heads, dim)
        options = {
            "sm_scale": call.scaling,
            "window_left": -1 if requests.window is None else requests.window - 1,
            "logits_soft_cap": call.softcap,
            "q_data_type": call.query.dtype,
            "kv_data_type": kv_dtype,
        }
        starts, indptr, indices, last = pinned(
            [requests.query_starts.astype(np.int32), *pages[1:]], call.query.device
        )
        if not requests.is_decode or not is_causal:
            self._kind = "prefill"
        elif heads // kv_heads >= TENSOR_CORE_GROUP:
            self._kind = "tensor cores"
        else:
            self._kind = "decode"
        self._stream, self._page_size = stream, pages.size
        self._turn = stream.take(self._kind)
        plan = self._turn.wrapper.plan
        if self._kind == "prefill":
            plan(starts, indptr, indices, last, *geometry, pages.size, causal=is_causal, **options)
        else:
            plan(indptr, indices, last, *geometry, pages.size, **options)
        self._turn.planned()

    def __del__(self) -> None:
        turn = getattr(self, "_turn", None)
        if turn is not None:
            self._stream.give_back(self._kind, turn)

    def run(
        self, query: torch.Tensor, memory: tuple[torch.Tensor, ...], has_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, heads, dim] and, where asked for, the LSE to base 2, float32 [tokens, heads]."""
        if self._page_size == 1:
            memory = tuple(m.flatten(0, 1)[:, None] for m in memory)
        with self._stream.lock:  # the workspace is for one caller at a time
            out = self._turn.wrapper.run(query, memory, return_lse=has_lse)
        return out if has_lse else (out, None)


class _Turn:
    """A wrapper, and whether its last plan is on the device.

    A plan is copied to the device from host memory that its wrapper owns, so the next one must not
    be made before that copy is done.
    """

    def __init__(self, wrapper: Any, device: torch.device):
        self.wrapper = wrapper
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def planned(self) -> None:
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def is_copied(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Wait until the plan is copied."""
        if self._copied is not None:
            self._copied.synchronize()


class _Stream:
    """What is kept for one stream of a device: a workspace, and wrappers that take turns."""

    @torch.inference_mode(False)  # what is made in inference mode could be written nowhere else
    def __init__(self, device: torch.device):
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.lock = threading.Lock()
        self._idle: dict[str, deque[_Turn]] = {
            kind: deque() for kind in ("decode", "tensor cores", "prefill")
        }
        self._made = dict.fromkeys(self._idle, 0)

    def take(self, kind: str) -> _Turn:
        """A wrapper that no plan uses and whose last plan is on the device, made if there is none.

        Of MAX_WRAPPERS, the one whose last plan is the oldest is waited for.
        """
        with self.lock:
            idle = self._idle[kind]
            if idle and (idle[0].is_copied() or self._made[kind] >= MAX_WRAPPERS):
                turn = idle.popleft()
            else:
                turn = _Turn(self._make(kind), self._device)
                self._made[kind] += 1
        turn.wait()
        return turn

    def give_back(self, kind: str, turn: _Turn) -> None:
        self._idle[kind].append(turn)

    @torch.inference_mode(False)
    def _make(self, kind: str) -> Any:
        import flashinfer

        if kind == "prefill":
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=kind == "tensor cores", backend="fa2"
        )


def _plan_of(call: AttentionCall, stream: _Stream) -> _Plan:
    """The plan of a step for all layers that are like this one."""
    # The layers share the array of first tokens itself, so it tells one pattern from another.
    key = (stream, id(call.first_visible), call.scaling, call.softcap, *_geometry(call))
    return call.metadata.memo(key, lambda: _Plan(call, stream))


def _geometry(call: AttentionCall) -> tuple[Any, ...]:
    """What a layer is like, for a kernel."""
    query, stored = call.query, call.storage.padded_keys
    return query.device, query.shape[1], query.dtype, stored.shape[2:], stored.dtype


def _cascade(
    call: AttentionCall, requests: Requests
) -> tuple[tuple[Requests, Pages], tuple[Requests, Pages]] | None:
    """Two passes for rows that begin with the same blocks, if that pays: their blocks, the rest.

    Only for a decode step that sees all of its rows. Rows that follow each other and begin with the
    same block are a group; a row without company is one of its own.
    """
    metadata, heads = call.metadata, call.query.shape[1]
    dim, rows = call.storage.padded_keys.shape[3], len(requests.row)
    if rows < 2 or not requests.is_decode or requests.window is not None:
        return None
    if requests.first.any() or heads * dim > MERGE_MAX_ELEMENTS:
        return None
    size, table = metadata.block_size, metadata.table[requests.row]
    starts = np.flatnonzero(np.append(True, table[1:, 0] != table[:-1, 0]))
    if len(starts) == rows:
        return None
    sizes = np.diff(np.append(starts, rows))
    # Something must be left for the second pass: the block of the last token.
    most = np.minimum.reduceat((requests.stop - 1) // size, starts)
    shared = np.array(
        [
            _common(table[start : start + count, :width])
            for start, count, width in zip(starts, sizes, most, strict=True)
        ]
    )
    saved = int(((sizes - 1) * shared).sum()) * size
    token_bytes = 2 * call.keys.shape[1] * dim * call.storage.keys.itemsize
    if (
        not shared.all()
        or saved * token_bytes < CASCADE_MIN_BYTES
        or saved < CASCADE_MIN_SHARE * requests.stop.sum()
    ):
        return None
    prefix = Requests(
        row=requests.row[starts],
        query_starts=np.append(starts, rows),
        first=np.zeros(len(starts), np.int64),
        stop=shared * size,
        window=None,
    )
    rest = requests._replace(first=np.repeat(shared * size, sizes))
    return tuple(  # type: ignore[return-value]
        (part, block_pages(metadata, part.row, part.first, part.stop)) for part in (prefix, rest)
    )


def _common(table: np.ndarray) -> int:
    """How many leading columns are the same in all rows."""
    differs = (table[1:] != table[0]).any(0)
    return int(differs.argmax()) if differs.any() else table.shape[1]


def _padded(states: torch.Tensor, dim: int) -> torch.Tensor:
    missing = dim - states.shape[-1]
    return F.pad(states, (0, missing)) if missing else states


def _merge(
    out: torch.Tensor, lse: torch.Tensor | None, other: torch.Tensor, other_lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    import flashinfer

    return flashinfer.merge_state(out, lse, other, other_lse)


def _with_sinks(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor) -> torch.Tensor:
    """Let a sink take its share of the softmax of each head; the LSE is to base 2."""
    assert lse is not None
    share = torch.sigmoid(lse * math.log(2) - sinks.float())
    return (out * share[..., None]).to(out.dtype)
