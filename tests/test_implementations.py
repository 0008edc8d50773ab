"""A PagedCache under every attention implementation: as a DynamicCache there, and it says so."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import ragged_ids, tiny
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from hf_paged import BlockPool, PagedCache, encoder_decoder_cache
from hf_paged.core import model_spec as geometry

Build = Callable[[str], PreTrainedModel]
# The flash ones need a GPU; transformers refuses them by name where their package is missing.
NAMES = ["eager", *(name for name in AttentionInterface().valid_keys() if "flash" not in name)]
STEPS = 6


def reason(name: str) -> str:
    return f"another attention implementation ({name})"


@pytest.fixture(autouse=True)
def eager_flex() -> Iterator[None]:
    """flex_attention as it is, not compiled; and nothing that a test compiles stays."""
    with torch.compiler.set_stance("force_eager"):
        yield
    torch._dynamo.reset()


# -- every feature, on a DynamicCache and on a PagedCache --------------------------------------


def generate(model: PreTrainedModel, cache: Cache, inputs: Any = None, **kwargs: Any) -> Any:
    inputs = ragged_ids([9, 4, 12]) if inputs is None else inputs
    kwargs = {"max_new_tokens": STEPS, "do_sample": False, **kwargs}
    return model.generate(**inputs, past_key_values=cache, **kwargs)


def forward(model: PreTrainedModel, cache: Cache, start: int, stop: int) -> torch.Tensor:
    ids = ragged_ids([30, 30])["input_ids"][:, start:stop]
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache).logits


def crop(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    forward(model, cache, 0, 12)
    cache.activate_past_recording()
    logits = [forward(model, cache, 12, 17)]
    cache.crop(-3)
    return torch.cat([*logits, forward(model, cache, 14, 15), forward(model, cache, 15, 24)], 1)


def fork(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    forward(model, cache, 0, 11)
    other = copy.deepcopy(cache)
    return torch.cat([forward(model, cache, 11, 14), forward(model, other, 20, 23)], 1)


def reorder(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    forward(model, cache, 0, 11)
    cache.reorder_cache(torch.tensor([1, 1]))
    return forward(model, cache, 11, 12)


def prefix(model: PreTrainedModel, cache: Cache) -> torch.Tensor:
    """A prompt, its answer and more: all but the last token of the first two is known."""
    first = generate(model, cache, {"input_ids": ragged_ids([20])["input_ids"]})
    prompt = torch.cat([first, ragged_ids([5], seed=1)["input_ids"]], 1)
    if isinstance(cache, PagedCache):
        cache.pool.insert_prefix(cache, first, attention_mask=torch.ones_like(first))
        cache = cache.pool.match_prefix(prompt)
        assert cache.get_seq_length() == first.shape[1] - 1
    return generate(model, cache, {"input_ids": prompt})


FEATURES: dict[str, Callable[[PreTrainedModel, Cache], torch.Tensor]] = {
    "greedy": generate,
    "beams": lambda *args: generate(*args, num_beams=3, num_return_sequences=2),
    "chunked prefill": lambda *args: generate(*args, prefill_chunk_size=4),
    "prompt lookup": lambda *args: generate(
        *args, {"input_ids": ragged_ids([6])["input_ids"].repeat(1, 3)}, prompt_lookup_num_tokens=3
    ),
    "crop": crop,
    "fork": fork,
    "reorder": reorder,
    "prefix": prefix,
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_dynamic_cache(
    tiny_model: Build, name: str, architecture: str, feature: str
) -> None:
    """Some implementations could not take what a PagedCache returned: flex_attention, for one."""
    model = tiny_model(architecture)
    model.set_attn_implementation(name)
    expected = FEATURES[feature](model, DynamicCache(config=model.config))
    cache = PagedCache(config=model.config, block_size=4)
    torch.testing.assert_close(FEATURES[feature](model, cache), expected, atol=1e-5, rtol=1e-5)
    report = cache.report()
    if name == "hf_paged":
        assert report.paged_calls
        assert not report.dense_calls
    else:
        assert not report.paged_calls
        assert report.dense_calls.keys() == {reason(name)}
    cache.pool.check()


# -- attention that is compiled ------------------------------------------------------------------


def grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, enable_gqa=True, **kwargs
    )


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
    mask = kwargs["attn_mask"]

    def add_mask(score: Any, row: Any, head: Any, at: Any, column: Any) -> torch.Tensor:
        return torch.where(mask[row, 0, at, column], score, -torch.inf)

    return flex_attention(
        query, key, value, score_mod=add_mask, scale=kwargs["scale"], enable_gqa=True
    )


@pytest.mark.parametrize("attend", [grouped, flex])
def test_compiled_attention_of_somebody_else(attend: Callable[..., Any]) -> None:
    """Dynamo cannot trace a tensor that holds no data; its graphs serve step after step."""
    compiled = torch.compile(attend, backend="eager", dynamic=True)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        assert type(key) is type(value) is torch.Tensor  # a kernel takes them by their address
        out = compiled(query, key, value, attn_mask=mask, scale=kwargs["scaling"])
        return out.transpose(1, 2).contiguous(), None

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})

    name = f"compiled_{attend.__name__}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    model = tiny("llama")
    model.set_attn_implementation(name)
    with torch.compiler.set_stance("default"):
        expected = generate(model, DynamicCache(config=model.config))
        cache = PagedCache(config=model.config, block_size=4)
        assert torch.equal(generate(model, cache), expected)
    assert cache.report().dense_calls == {reason(name): 4 * STEPS}


@pytest.mark.slow  # it compiles for a minute
def test_flex_attention_as_transformers_compiles_it(tiny_model: Build) -> None:
    """It ended in an error inside Dynamo. (Its graphs of varying size do not compile on a CPU.)"""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    expected = forward(model, DynamicCache(config=model.config), 0, 13)[:, 12:]
    model.set_attn_implementation("flex_attention")
    cache = PagedCache(config=model.config, block_size=4)
    static = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    with torch.compiler.set_stance("default"), static:
        forward(model, cache, 0, 12)
        found = forward(model, cache, 12, 13)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert cache.report().dense_calls == {reason("flex_attention"): 4 * 2}


def test_the_mask_of_flex_attention_is_made_for_a_plain_length(tiny_model: Build) -> None:
    """It is compiled code, which was compiled anew for each int that knows its cache."""
    model = tiny_model("llama")
    for name, is_plain in (("flex_attention", True), ("hf_paged", False)):
        model.set_attn_implementation(name)
        length, _ = PagedCache(config=model.config).get_mask_sizes(3, 0)
        assert length == 3
        assert (type(length) is int) == is_plain


def test_a_forward_that_is_compiled_in_part() -> None:
    """Once the recompile limit is hit its layers run as they are, with a mask that compiled code
    has made: the report took that for "a mask that is more than causal"."""
    model, inputs = tiny("gemma3_text"), ragged_ids([12, 12])
    expected = generate(model, DynamicCache(config=model.config), inputs)
    model.set_attn_implementation("hf_paged")
    model.compile(backend="eager")
    cache = PagedCache(config=model.config)
    with (
        torch.compiler.set_stance("default"),
        torch._dynamo.config.patch(recompile_limit=4),
    ):
        assert torch.equal(generate(model, cache, inputs), expected)
    report = cache.report()
    assert report.dense_calls.keys() == {"torch.compile"}
    assert report.paged_calls + report.dense_calls["torch.compile"] == 4 * STEPS


# -- what the report and the log say ---------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """As in a new process."""
    geometry.advise.cache_clear()
    caplog.set_level(logging.WARNING, logger="hf_paged")
    return caplog


def advice(log: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in log.messages if 'attn_implementation="hf_paged"' in text]


def test_forgetting_our_attention_is_said_once(
    tiny_model: Build, log: pytest.LogCaptureFixture
) -> None:
    """The report said "cpu, 0 calls", and nothing said why."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("sdpa")
    for _ in range(2):
        cache = PagedCache(config=model.config)
        generate(model, cache)
        assert cache.report().dense_calls == {reason("sdpa"): 4 * STEPS}
    assert f"{4 * STEPS} calls: {reason('sdpa')}" in str(cache.report())
    assert len(advice(log)) == 1
    assert reason("sdpa") in advice(log)[0]


def test_a_cache_that_changes_its_attention_counts_each_step_once(
    tiny_model: Build, log: pytest.LogCaptureFixture
) -> None:
    """Weights that are asked for are another reason than another implementation."""
    model = tiny_model("llama")
    cache = PagedCache(config=model.config)
    for start, name in enumerate(["hf_paged", "eager", "sdpa", "hf_paged"]):
        model.set_attn_implementation(name)
        forward(model, cache, 5 * start, 5 * start + 5)
    with torch.no_grad():
        model(torch.tensor([[3], [4]]), past_key_values=cache, output_attentions=True)
    report = cache.report()
    assert report.paged_calls == 4 * 2
    assert report.dense_calls == {reason("eager"): 4, reason("sdpa"): 4, "output_attentions": 4}
    assert len(advice(log)) == 2


OWN_WAYS = {
    "deepseek_v2": {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 2,
                    "num_experts_per_tok": 1, "first_k_dense_replace": 4},
    "bloom": {"n_layer": 4, "n_head": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_WAYS)
def test_models_that_read_their_keys_say_that_instead(
    name: str, log: pytest.LogCaptureFixture
) -> None:
    """MLA computes with them in front of our function, BLOOM calls none; nothing was counted."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0,
             "num_hidden_layers": 4, "intermediate_size": 48}  # fmt: skip
    config = AutoConfig.for_model(name, **{**sizes, **OWN_WAYS[name]})
    model = AutoModelForCausalLM.from_config(config).eval()
    if model._can_set_attn_implementation():
        model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config)
    generate(model, cache, eos_token_id=None)
    report = cache.report()
    assert (report.paged_calls, report.dense_calls) == (0, {geometry.READ_BY_MODEL: 4 * STEPS})
    assert not advice(log)


@pytest.mark.parametrize("name", ["hf_paged", "flex_attention"])
def test_a_config_that_no_model_has(tiny_model: Build, name: str) -> None:
    """A pool may be made from a config of its own, which does not say who attends."""
    model = tiny_model("llama")
    config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": None})
    assert config._attn_implementation is None
    model.set_attn_implementation(name)
    expected = generate(model, DynamicCache(config=model.config))
    cache = PagedCache(pool=BlockPool(config, block_size=4))
    assert torch.equal(generate(model, cache), expected)
    report = cache.report()
    assert bool(report.paged_calls) == (name == "hf_paged")
    assert report.dense_calls.keys() == (set() if name == "hf_paged" else {geometry.UNNAMED})


def test_a_config_that_transformers_copies() -> None:
    """`get_text_config` copies that of an encoder-decoder model, and the copy went stale."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 99,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **sizes)).eval()
    cache = encoder_decoder_cache(model.config)
    model.set_attn_implementation("sdpa")
    generate(model, cache, eos_token_id=None, forced_eos_token_id=None)
    report = cache.self_attention_cache.report()
    assert report.dense_calls == {reason("sdpa"): 2 * STEPS}
