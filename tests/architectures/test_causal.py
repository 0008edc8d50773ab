"""Every causal language model of transformers gives on a PagedCache what a DynamicCache gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_paged import PagedCache

from .compare import (
    RUNS,
    TOLERANCE,
    Result,
    compare,
    decode_path,
    groups,
    text_inputs,
    without_ours,
)
from .models import (
    BASELINE,
    IS_NEWEST,
    LEFT_OUT,
    NOT_IN_TRANSFORMERS,
    OTHER_ATTENTION,
    OVERRIDES,
    REFUSED,
    SAMPLE,
    is_tested,
)
from .zoo import build, tiny_config

SECTION = "Causal language models"
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow)
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name not in LEFT_OUT and is_tested(name)
]


def tiny(name: str, attention: str | None = None, **sizes: int) -> PreTrainedModel:
    """As `from_pretrained` would load it with this attention implementation, None for the best.

    `sizes` are other values for fields that the config has.
    """
    config = tiny_config(name, OVERRIDES.get(name, {}))
    for field, size in sizes.items():
        if getattr(config, field, None) is not None:
            setattr(config, field, size)
    return build(AutoModelForCausalLM.from_config, config, attention)


@pytest.mark.parametrize("name", NAMES)
def test_equals_dynamic_cache(name: str, note: Callable[[Result], None]) -> None:
    result = Result(SECTION, name)
    model = tiny(name, BASELINE.get(name))
    config = model.config
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]) as error:
            PagedCache(config=config)
        result.result, result.remarks = "refused", [str(error.value)]
        return note(result)

    if name in OTHER_ATTENTION:
        kind_of_error, words = OTHER_ATTENTION[name]
        with pytest.raises(kind_of_error, match=words):
            RUNS["greedy"](tiny(name, "hf_paged"), PagedCache(config=config), text_inputs())
        result.remarks.append(without_ours(kind_of_error))
    models = model, tiny(name, None if name in OTHER_ATTENTION else "hf_paged")
    for kind, run in RUNS.items():
        caches = DynamicCache(config=config), PagedCache(config=config, block_size=4)
        if kind in NOT_IN_TRANSFORMERS.get(name, ()) or (
            kind == "prompt lookup" and models[0]._is_stateful
        ):
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the model trips over
                run(models[0], caches[0], text_inputs())
            result.remarks.append(f"no {kind} in transformers")
            continue
        compare(run, models, caches, text_inputs())
    cache = PagedCache(config=models[1].config, block_size=4)
    result.path = decode_path(models[1], cache, cache, text_inputs())
    result.groups = groups(cache)
    return note(result)


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache, PagedCache])
def test_queries_stay_causal_where_some_are_dropped(name: str, cache: Callable[..., Cache]) -> None:
    """From the layers that share K/V on, Gemma 4 drops the tokens whose logits nobody asks for."""
    ids, model = text_inputs(rows=1, padding=0)["input_ids"], tiny(name, "hf_paged")
    assert model.config.num_kv_shared_layers > 0
    sizes = {"max_cache_len": 32} if cache is StaticCache else {}
    with torch.no_grad():
        expected = tiny(name, "eager")(ids, use_cache=False).logits[:, -3:]
        found = model(ids, past_key_values=cache(config=model.config, **sizes), logits_to_keep=3)
    torch.testing.assert_close(found.logits, expected, atol=TOLERANCE, rtol=0)


def test_a_mask_may_show_more_than_a_window() -> None:
    """Moshi's config has a window, by which a cache drops tokens, but its masks are causal.

    So it sees its prompt whole, and in what follows all that is kept. Were the window of a layer
    taken for that of its mask, this model would be wrong, alone of all that have windows.
    """
    model, (ids,) = tiny("moshi", "hf_paged"), text_inputs(rows=1, padding=0)["input_ids"]
    reach = model.config.num_hidden_layers * (model.config.sliding_window - 1)
    assert reach < len(ids) - 1  # windows would not let the last token know of the first
    logits = []
    for first in (3, 4):
        cache = PagedCache(config=model.config, block_size=4)
        with torch.no_grad():
            ids[0] = first
            logits.append(model(ids[None], past_key_values=cache).logits[0, -1])
        assert cache.report().dense_calls == {}
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_every_name_is_accounted_for() -> None:
    """Nothing is left out silently, and enough is tested."""
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {param.values[0] for param in NAMES} | LEFT_OUT.keys() >= {*filter(is_tested, names)}
    if IS_NEWEST:
        assert {*SAMPLE, *LEFT_OUT} <= names
        assert len({param.values[0] for param in NAMES} - REFUSED.keys()) >= 165


def test_the_readme_quotes_the_totals() -> None:
    root = Path(__file__).parents[2]
    readme = " ".join((root / "README.md").read_text().split())
    totals = re.findall(
        r"(\d+) architectures: (\d+) pass, (\d+) of them paged; (\d+) refused; (\d+) left out",
        (root / "docs" / "architectures.md").read_text(),
    )
    (every, passed, paged, refused, left_out), (seq2seq, *_), (media, *_) = totals
    assert (
        f"of the {every} in its causal-LM mapping (5.24) {passed} pass, {paged} of them with paged "
        f"decode; {refused} are refused with the reason and {left_out} left out. So do {seq2seq} "
        f"encoder-decoder and {media} vision and audio models."
    ) in readme
    assert int(passed) >= 140
    assert int(paged) >= 100


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_what_is_left_out_is_in_the_table(name: str, note: Callable[[Result], None]) -> None:
    note(Result(SECTION, name, result="left out", remarks=[LEFT_OUT[name]]))


@pytest.mark.parametrize("wrong_value", [0, float("nan")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "bloom"])
def test_the_comparison_would_notice(
    name: str, wrong_value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong token in the past shows in the logits, also in the smallest of models."""
    models = tiny(name), tiny(name, "hf_paged")
    wrong = PagedCache(config=models[0].config, block_size=4)
    update = PagedCache.update

    def spoilt(self: PagedCache, keys: torch.Tensor, values: torch.Tensor, *args: object) -> object:
        if keys.shape[2] > 1:
            values = values.index_fill(2, torch.tensor([keys.shape[2] - 2]), wrong_value)
        return update(self, keys, values, *args)

    monkeypatch.setattr(PagedCache, "update", lambda self, k, v, i, *a, **kw: spoilt(self, k, v, i))
    caches = DynamicCache(config=models[0].config), wrong
    with pytest.raises(AssertionError, match="not close"):
        compare(RUNS["greedy"], models, caches, text_inputs())
