"""torch.set_default_device and torch.set_default_dtype change nothing of what the library does."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ragged_ids, tiny

import hf_paged
from hf_paged import BlockPool, FreeFinishedRows, PagedCache

INPUTS = ragged_ids([20, 9, 13])
IDS, MASK = INPUTS.values()
MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand"),
    *("randint", "randn", "scalar_tensor", "tensor", "zeros"),
}


def test_every_tensor_names_its_dtype_and_device() -> None:
    """Some were made where, and of what, the defaults say: on a GPU, or in 16 bits."""
    unnamed, makers = [], 0
    for path in sorted(Path(hf_paged.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKERS:
                makers += 1
                if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}:
                    unnamed.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert makers > 10
    assert unnamed == []


@pytest.fixture(scope="module")
def model() -> Any:
    """With windows, which a prompt is longer than."""
    model = tiny("gemma3_text")
    model.set_attn_implementation("hf_paged")
    return model


@torch.no_grad()
def forwards(
    model: Any, cache: PagedCache, steps: int = 4, stop: Any = None, mask: torch.Tensor = MASK
) -> torch.Tensor:
    """Greedy decoding step by step: generate itself fails where the defaults are others."""
    ids, out = IDS, []
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(steps):
        logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        if stop is not None:
            ids = ids.masked_fill(stop(ids, None)[:, None], 0)
        mask, positions = F.pad(mask, (0, 1), value=1), positions[:, -1:] + 1
        out.append(ids if stop is not None else logits)
    return torch.stack(out)


def prompts(model: Any) -> list[torch.Tensor]:
    return [forwards(model, PagedCache(config=model.config, block_size=4))]


def rows(model: Any) -> list[torch.Tensor]:
    cache = PagedCache(config=model.config, backend="dense")
    forwards(model, cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices([0, 3, 5])
    cache.reorder_cache([2, 0, 1])
    cache.free_rows([1])
    return [part for layer in cache for part in layer if part is not None]


def ended_rows(model: Any) -> list[torch.Tensor]:
    cache = PagedCache(config=model.config, backend="dense")
    end = int(forwards(model, PagedCache(config=model.config, backend="dense"))[1, 1].argmax())
    found = forwards(model, cache, stop=FreeFinishedRows(cache, end))
    assert cache.freed_rows[1]
    return [found]


def batches(model: Any) -> list[torch.Tensor]:
    pool = BlockPool(model, num_blocks=12)
    found = pool.batches([[5] * 9, [6] * 4, [7] * 12], max_new_tokens=4, max_prompts=2)
    return [tensor for batch in found for tensor in batch.inputs.values()]


@pytest.mark.parametrize("work", [prompts, rows, ended_rows, batches])
def test_tensors_are_where_the_model_is(
    model: Any, work: Callable[[Any], list[torch.Tensor]]
) -> None:
    """On the meta device a tensor has no data, so that each that goes there shows."""
    expected = work(model)
    torch.set_default_device("meta")
    try:
        found = work(model)
    finally:
        torch.set_default_device(None)
    for one, other in zip(found, expected, strict=True):
        assert one.device == other.device
        assert torch.equal(one, other)
