"""What each architecture is put through, once on a DynamicCache and once on a PagedCache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache, PreTrainedModel, StoppingCriteria

from hf_paged import PagedCache

TOLERANCE = 3e-4
Inputs = dict[str, Any]
Run = Callable[[PreTrainedModel, Cache, Inputs], Any]


def text_inputs(rows: int = 2, width: int = 21, padding: int = 7) -> Inputs:
    """Random ids; the last row is padded on the left."""
    ids = torch.randint(3, 90, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Cache, inputs: Inputs, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(
        **inputs,
        past_key_values=cache,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{"max_new_tokens": 12, **kwargs},
    )


def greedy(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    return generate(model, cache, inputs)


def beams(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    return generate(model, cache, inputs, num_beams=3)


def prompt_lookup(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    """One row whose tokens repeat, so that there is something to look up."""
    ids = inputs["input_ids"][:1, :7].repeat(1, 3)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return generate(model, cache, inputs, prompt_lookup_num_tokens=3)


def conversation(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    """A second turn behind the first answer, on the same cache."""
    out = generate(model, cache, inputs, max_new_tokens=5)
    turn = text_inputs(rows=len(out.sequences), width=4, padding=0)["input_ids"]
    ids = torch.cat([out.sequences, turn], dim=1)
    grown = ids.shape[1] - inputs["attention_mask"].shape[1]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, grown), value=1)
    return generate(model, cache, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=5)


RUNS: dict[str, Run] = {
    "greedy": greedy,
    "beams": beams,
    "prompt lookup": prompt_lookup,
    "conversation": conversation,
}


class FirstStep(StoppingCriteria):
    """Stops nothing; notes which way attention had gone when the prompt was done."""

    def __init__(self, cache: PagedCache):
        self.cache = cache
        self.calls: tuple[int, Counter[str]] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        if self.calls is None:
            report = self.cache.report()
            self.calls = report.paged_calls, Counter(report.dense_calls)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def decode_path(model: PreTrainedModel, cache: PagedCache, whole: Cache, inputs: Inputs) -> str:
    """Which way attention goes in the decode steps of a greedy run: "paged", or "dense" and why."""
    first = FirstStep(cache)
    generate(model, whole, inputs, max_new_tokens=3, stopping_criteria=[first])
    report = cache.report()
    assert first.calls is not None
    dense = Counter(report.dense_calls) - first.calls[1]
    if dense:
        some = "some layers " if report.paged_calls > first.calls[0] else ""
        return f"{some}dense: {', '.join(sorted(dense))}"
    assert report.paged_calls > first.calls[0]
    return "paged"


def groups(cache: PagedCache) -> str:
    """The layer groups, e.g. "2 full, 2 of window 8", and the layers that keep something else."""
    parts = [
        f"{len(group.layers)} {'full' if group.window is None else f'of window {group.window}'}"
        for group in cache.pool.groups
    ]
    states = len(cache.pool.model.spec.stateful_layers)
    return ", ".join(parts) + (f"; {states} with other states" if states else "")


def same_logits(found: Any, expected: Any) -> None:
    """Those of every step of two runs are within TOLERANCE; a NaN is like nothing, not even NaN."""
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(expected.logits), atol=TOLERANCE, rtol=0
    )


def compare(
    run: Run,
    models: tuple[PreTrainedModel, PreTrainedModel],
    caches: tuple[Cache, Cache],
    inputs: Inputs,
) -> None:
    """Run on both, the plain model and cache first; AssertionError unless they agree.

    Sequences must be equal and logits the same, and the paged cache must have been used.
    """
    expected = run(models[0], caches[0], inputs)
    found = run(models[1], caches[1], inputs)
    same_logits(found, expected)
    assert torch.equal(found.sequences, expected.sequences)
    cache = caches[1]
    paged = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    assert isinstance(paged, PagedCache)
    assert paged.pool.num_used > 0, "the cache was not used"
    paged.pool.check()


@dataclass
class Result:
    """A row of docs/architectures.md."""

    section: str
    name: str
    result: str = "pass"
    path: str = ""
    groups: str = ""
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [f"`{self.name}`", self.result, self.path, self.groups, "; ".join(self.remarks)]
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def without_ours(error: type[Exception]) -> str:
    """The remark on a model that cannot run on our attention, but on that of transformers."""
    return f'{error.__name__} with attn_implementation="hf_paged": load it without'
