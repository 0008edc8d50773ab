"""FlashInfer without a GPU: its own Python code runs, only its compiled modules are replaced.

What stands in for a compiled module computes attention in float64 from exactly the arguments that
FlashInfer's Python code hands to it: page tables, offsets, last page lengths, window, softcap,
scale, mask mode. So a wrong table or an offset that is off by one gives wrong numbers. Whatever the
kernels (0.7.4, fa2) would refuse, misread or overrun fails an assertion here: dtypes, the width of
integers, strides, alignment, head dims, head groups, another plan than the one that is run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

KERNEL_HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
NON_CAUSAL, CAUSAL = 0, 1
NHD = 0
VECTOR_BYTES = 16  # what the kernels load at a time


@dataclass
class Plan:
    """What a kernel's plan leaves in the wrapper's buffers."""

    indptr: torch.Tensor
    heads: int
    kv_heads: int
    page_size: int
    window_left: int
    rows: int
    qo_indptr: torch.Tensor | None = None
    is_causal: bool = False


@dataclass
class Emulation:
    """What ran: the modules that were built, and each plan and run by kind, in order."""

    modules: list[tuple[Any, ...]] = field(default_factory=list)
    runs: list[tuple[str, Plan]] = field(default_factory=list)
    merges: int = 0
    # By the wrapper's host buffer, as the copy of a plan to the device is read from there.
    planned: dict[int, Plan] = field(default_factory=dict)
    order: list[tuple[str, int]] = field(default_factory=list)

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.runs}


class _Spec:
    """What FlashInfer's generators return: something that is built and loaded."""

    def __init__(self, module: Any):
        self._module = module

    def build_and_load(self) -> Any:
        return self._module


class _Module:
    """What decode and prefill modules have in common."""

    kind: str

    def __init__(self, emulation: Emulation, arguments: tuple[Any, ...]):
        self._emulation = emulation
        (
            self.q_dtype,
            self.kv_dtype,
            self.o_dtype,
            index_dtype,
            self.dim,
            value_dim,
            position_encoding,
            self.has_window,
            self.has_softcap,
            *rest,
        ) = arguments
        assert self.q_dtype in (torch.float16, torch.bfloat16), self.q_dtype
        assert self.kv_dtype in (self.q_dtype, torch.float8_e4m3fn, torch.float8_e5m2)
        assert self.o_dtype == self.q_dtype
        assert index_dtype == torch.int32
        assert self.dim == value_dim
        assert self.dim in KERNEL_HEAD_DIMS
        assert position_encoding == 0
        assert not any(rest)
        emulation.modules.append((self.kind, *arguments))

    def _plan(
        self, float_buffer: torch.Tensor, int_buffer: torch.Tensor, host: torch.Tensor, plan: Plan
    ) -> list[int]:
        check_host_indptr(plan.indptr)
        assert len(plan.indptr) > 1, "a plan without requests fails"
        assert int_buffer.nbytes == host.nbytes == 8 << 20
        assert float_buffer.nbytes >= 128 << 20
        assert plan.heads % plan.kv_heads == 0
        assert plan.page_size > 0
        assert self.has_window == (plan.window_left >= 0), "the module ignores the window"
        self._emulation.order.append((self.kind, host.data_ptr()))
        self._emulation.planned[int_buffer.data_ptr()] = plan
        return [id(plan)]

    def _planned(self, int_buffer: torch.Tensor, plan_info: list[int]) -> Plan:
        plan = self._emulation.planned[int_buffer.data_ptr()]
        assert plan_info == [id(plan)], "the wrapper has been planned for something else since"
        return plan

    def _attend(
        self,
        plan: Plan,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        is_causal: bool,
        layout: int,
        window_left: int,
        softcap: float,
        scale: float,
    ) -> None:
        pages, page_size, kv_heads, dim = keys.shape
        assert layout == NHD
        assert (q.dtype, keys.dtype, values.dtype) == (self.q_dtype, self.kv_dtype, self.kv_dtype)
        assert q.shape == (plan.rows, plan.heads, self.dim)
        assert (page_size, kv_heads, dim) == (plan.page_size, plan.kv_heads, self.dim)
        assert keys.shape == values.shape
        assert keys.stride() == values.stride(), "another module would have to be compiled"
        for tensor in (q, keys, values, out):
            check_vectors(tensor)
        for indices in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert indices.dtype == torch.int32
            assert indices.is_contiguous()
        assert torch.equal(kv_indptr, plan.indptr)
        assert window_left == plan.window_left
        assert self.has_softcap == (softcap > 0)
        assert len(kv_indices) == kv_indptr[-1]
        assert len(last_page_len) == len(kv_indptr) - 1 == len(qo_indptr) - 1
        assert bool(((kv_indices >= 0) & (kv_indices < pages)).all())
        assert bool(((last_page_len > 0) & (last_page_len <= page_size)).all())
        assert out.shape == q.shape
        assert out.dtype == self.o_dtype
        assert out.is_contiguous()
        if lse is not None:
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        self._emulation.runs.append((self.kind, plan))
        for request in range(len(last_page_len)):
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            table = kv_indices[kv_indptr[request] : kv_indptr[request + 1]].long()
            length = (len(table) - 1) * page_size + int(last_page_len[request])
            k, v = (t[table].flatten(0, 1)[:length].double() for t in (keys, values))
            o, s = attention(
                q[rows].double(),
                k,
                v,
                is_causal,
                window_left if self.has_window else -1,
                softcap if self.has_softcap else 0.0,
                scale,
            )
            out[rows] = o.to(out.dtype)
            if lse is not None:
                lse[rows] = s.float()


class DecodeModule(_Module):
    """Decode on CUDA cores."""

    kind = "decode"

    def plan(
        self,
        float_buffer: torch.Tensor,
        int_buffer: torch.Tensor,
        host_buffer: torch.Tensor,
        indptr: torch.Tensor,
        batch_size: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        is_graph: bool,
        window_left: int,
        softcap: float,
        dim: int,
        value_dim: int,
        empty_q: torch.Tensor,
        empty_kv: torch.Tensor,
    ) -> list[int]:
        assert heads // kv_heads in CUDA_CORE_GROUPS
        assert dim == value_dim == self.dim
        assert batch_size == len(indptr) - 1
        assert not is_graph
        assert (empty_q.dtype, empty_kv.dtype) == (self.q_dtype, self.kv_dtype)
        assert self.has_softcap == (softcap > 0)
        plan = Plan(indptr, heads, kv_heads, page_size, window_left, batch_size)
        return self._plan(float_buffer, int_buffer, host_buffer, plan)

    def run(
        self,
        float_buffer: torch.Tensor,
        int_buffer: torch.Tensor,
        plan_info: list[int],
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        alibi_slopes: torch.Tensor,
        softcap: float,
        scale: float,
        rope_rcp_scale: float,
        rope_rcp_theta: float,
    ) -> None:
        plan = self._planned(int_buffer, plan_info)
        rows = torch.arange(len(q) + 1, dtype=torch.int32)
        self._attend(
            plan, q, keys, values, rows, kv_indptr, kv_indices, last_page_len, out, lse,
            False, layout, window_left, softcap, scale,
        )  # fmt: skip


class PrefillModule(_Module):
    """Prefill, and decode on tensor cores."""

    kind = "prefill"

    def plan(
        self,
        float_buffer: torch.Tensor,
        int_buffer: torch.Tensor,
        host_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        total_rows: int,
        batch_size: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        is_graph: bool,
        dim: int,
        value_dim: int,
        is_causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated_ctas: int,
        uniform_q_len: int,
        fixed_uniform_q_len: bool,
    ) -> list[int]:
        check_host_indptr(qo_indptr)
        assert kv_lens.dtype == torch.int32
        assert dim == value_dim == self.dim
        assert batch_size == len(kv_indptr) - 1 == len(qo_indptr) - 1
        assert total_rows == qo_indptr[-1]
        assert not is_graph
        assert is_causal or window_left < 0 or bool((qo_indptr.diff() == 1).all()), (
            "a window without a causal mask is wrong where the kernel splits a row"
        )
        plan = Plan(
            kv_indptr, heads, kv_heads, page_size, window_left, total_rows, qo_indptr, is_causal
        )
        return self._plan(float_buffer, int_buffer, host_buffer, plan)

    def paged_run(
        self,
        float_buffer: torch.Tensor,
        int_buffer: torch.Tensor,
        plan_info: list[int],
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        custom_mask: None,
        mask_indptr: None,
        alibi_slopes: torch.Tensor,
        prefix_len: None,
        token_pos_in_items: None,
        max_item_len: None,
        key_scales: None,
        value_scales: None,
        softcap: float,
        scale: float,
        rope_rcp_scale: float,
        rope_rcp_theta: float,
        token_pos_in_items_len: int,
    ) -> None:
        plan = self._planned(int_buffer, plan_info)
        assert torch.equal(qo_indptr, plan.qo_indptr)
        assert mask_mode == (CAUSAL if plan.is_causal else NON_CAUSAL)
        self._attend(
            plan, q, keys, values, qo_indptr, kv_indptr, kv_indices, last_page_len, out, lse,
            mask_mode == CAUSAL, layout, window_left, softcap, scale,
        )  # fmt: skip

    def ragged_run(self, *args: Any) -> None:
        raise AssertionError("K/V are always in pages")


class CascadeModule:
    """Merging of attention over disjoint sets of tokens."""

    def __init__(self, emulation: Emulation):
        self._emulation = emulation

    def merge_state(
        self,
        v_a: torch.Tensor,
        s_a: torch.Tensor,
        v_b: torch.Tensor,
        s_b: torch.Tensor,
        v_merged: torch.Tensor,
        s_merged: torch.Tensor,
    ) -> None:
        assert v_a.shape == v_b.shape == v_merged.shape
        assert s_a.shape == s_b.shape == v_a.shape[:2]
        assert v_a.dtype == v_b.dtype
        assert v_a.dtype in (torch.float16, torch.bfloat16)
        assert v_a.shape[2] in KERNEL_HEAD_DIMS
        assert v_a.shape[1] * v_a.shape[2] <= 8192, "more threads than a block has"
        for tensor in (v_a, s_a, v_b, s_b):
            assert tensor.is_contiguous()
        self._emulation.merges += 1
        a, b = s_a.double() * math.log(2), s_b.double() * math.log(2)
        total = torch.logaddexp(a, b)
        merged = v_a * (a - total).exp()[..., None] + v_b * (b - total).exp()[..., None]
        v_merged.copy_(merged)
        s_merged.copy_(total / math.log(2))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    window_left: int,
    softcap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [n, heads, dim] aligned to the end of K/V [m, kv_heads, dim]; and the LSE, base 2."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    token = torch.arange(len(k))
    visible = torch.ones(len(q), len(k), dtype=torch.bool)
    if is_causal:
        visible &= token <= position
    if window_left >= 0:
        visible &= token >= position - window_left
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1)
    # What is hidden has the weight 0 and is multiplied all the same, as in the kernels.
    out = torch.einsum("hnm,mhd->nhd", (logits - lse[..., None]).exp(), v)
    return out, lse.T / math.log(2)


def check_host_indptr(indptr: torch.Tensor) -> None:
    """The planners read raw int32 from the host."""
    assert indptr.device.type == "cpu"
    assert indptr.dtype == torch.int32
    assert indptr.is_contiguous()
    assert indptr[0] == 0
    assert bool((indptr.diff() >= 0).all())


def check_vectors(tensor: torch.Tensor) -> None:
    """The kernels load and store 16 bytes at a time."""
    assert tensor.stride(-1) == 1
    assert tensor.data_ptr() % VECTOR_BYTES == 0
    assert all(s * tensor.itemsize % VECTOR_BYTES == 0 for s in tensor.stride()[:-1])


def install(patch: pytest.MonkeyPatch) -> Emulation:
    """Replace FlashInfer's compiled modules, and the pinned memory that only CUDA has."""
    from flashinfer import cascade, decode, prefill

    emulation = Emulation()

    def prefill_spec(backend: str, *arguments: Any) -> _Spec:
        assert backend == "fa2", backend
        return _Spec(PrefillModule(emulation, arguments))

    def no_spec(*arguments: Any) -> None:
        """The module for K and V of different strides is compiled only when it is used."""

    patch.setattr(decode, "gen_batch_decode_module", lambda *a: _Spec(DecodeModule(emulation, a)))
    patch.setattr(prefill, "_gen_batch_prefill_primary_module", prefill_spec)
    patch.setattr(prefill, "_gen_batch_prefill_independent_paged_module", no_spec)
    patch.setattr(cascade, "gen_cascade_module", lambda: _Spec(CascadeModule(emulation)))
    clear_modules()
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *a, pin_memory=False, **kw: empty(*a, **kw))
    return emulation


def clear_modules() -> None:
    """Have FlashInfer load its modules anew."""
    from flashinfer import cascade, decode, prefill

    for cached in (
        decode.get_batch_decode_module,
        prefill.get_batch_prefill_module,
        cascade.get_cascade_module,
    ):
        cached.cache_clear()
