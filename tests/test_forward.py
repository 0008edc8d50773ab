"""A loop of forwards, attention of other kinds, and models that never see a PagedCache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from conftest import TINY, ragged_ids, tiny
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from hf_paged import PagedCache
from hf_paged.core.metadata import MaskFacts, Pattern
from hf_paged.view import LazyMask

Build = Callable[[str], PreTrainedModel]
CHUNKS = {"one by one": [1] * 24, "uneven": [5, 1, 9, 2, 7], "two": [23, 1]}


def forward(
    model: PreTrainedModel, attention: str, cache: object, chunks: list[int]
) -> torch.Tensor:
    """Logits of a ragged batch of 24 columns, computed chunk by chunk."""
    model.set_attn_implementation(attention)
    inputs = ragged_ids([24, 9, 17])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits, start = [], 0
    with torch.no_grad():
        for size in chunks:
            stop = start + size
            out = model(
                input_ids=inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=cache is not None,
            )
            logits.append(out.logits)
            start = stop
    # What is computed at padding means nothing.
    return torch.cat(logits, 1)[inputs["attention_mask"].bool()]


@pytest.mark.parametrize("attention", ["hf_paged", "sdpa"])
def test_autocast(tiny_model: Build, attention: str) -> None:
    """Rotary embeddings make K float32 there, while V are bfloat16."""
    model = tiny_model("llama")
    exact = forward(model, "eager", None, [24])
    with torch.autocast("cpu", torch.bfloat16):
        theirs = forward(model, "sdpa", DynamicCache(config=model.config), [20, 3, 1])
        cache = PagedCache(config=model.config, block_size=4)
        ours = forward(model, attention, cache, [20, 3, 1])
    error, floor = ((logits - exact).abs().max() for logits in (ours, theirs))
    assert error <= 2 * floor
    cache.pool.check()


def test_a_mask_is_used_again_after_a_forward_that_failed(tiny_model: Build) -> None:
    """Its caller has made it, and it says what is padding the second time too."""
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config)
    ids, padding = ragged_ids([6, 3]).values()
    embedded = model.get_input_embeddings()(ids)
    mask = create_causal_mask(
        config=model.config, inputs_embeds=embedded, attention_mask=padding, past_key_values=cache
    )

    def fail(*args: object) -> None:
        raise InterruptedError

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    hook.remove()
    model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    assert cache.row_lengths == [6, 3]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("attention", ["hf_paged", "eager"])
def test_chunks_equal_one_pass(tiny_model: Build, name: str, chunks: str, attention: str) -> None:
    model = tiny_model(name)
    whole = forward(model, "eager", None, [24])
    cache = PagedCache(config=model.config, block_size=4)
    found = forward(model, attention, cache, CHUNKS[chunks])
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
    cache.pool.check()
    # Only our own mask function tells which columns are padding.
    assert cache.row_lengths == ([24, 9, 17] if attention == "hf_paged" else [24, 24, 24])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sdpa_densifies(tiny_model: Build, name: str) -> None:
    model = tiny_model(name)
    whole = forward(model, "sdpa", None, [24])
    found = forward(model, "sdpa", PagedCache(config=model.config, block_size=4), [11, 1, 12])
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_other_caches_work_with_our_attention(tiny_model: Build, name: str) -> None:
    """What is paged belongs to the call, not to the model."""
    model = tiny_model(name)
    whole = forward(model, "eager", None, [24])
    for cache, chunks in ((None, [24]), (DynamicCache(config=model.config), [11, 1, 12])):
        found = forward(model, "hf_paged", cache, chunks)
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradients_equal_those_of_eager(tiny_model: Build, name: str) -> None:
    model = tiny_model(name)
    inputs = ragged_ids([12, 7])
    predicted = inputs["attention_mask"].bool() & inputs["attention_mask"].roll(1).bool()
    labels = inputs["input_ids"].masked_fill(~predicted, -100)
    gradients = []
    for attention in ("eager", "hf_paged"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    assert len(gradients[0]) == len(gradients[1]) > 0
    for eager, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("attention", ["hf_paged", "sdpa", "eager"])
def test_training_through_a_paged_cache_is_refused(tiny_model: Build, attention: str) -> None:
    """Its K/V carry no gradient, so a loss through it would have a silently wrong one."""
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    inputs = ragged_ids([12, 7])
    cache = PagedCache(config=model.config)
    loss = model(**inputs, labels=inputs["input_ids"], past_key_values=cache).loss
    with pytest.raises(RuntimeError, match="without their gradients"):
        loss.backward()
    model.zero_grad()


def test_a_later_token_leaves_earlier_logits_alone(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    ids = ragged_ids([20])["input_ids"]
    changed = ids.clone()
    changed[0, 15] = (ids[0, 15] + 1) % 99
    with torch.no_grad():
        a, b = (
            model(input_ids=x, past_key_values=PagedCache(config=model.config)).logits
            for x in (ids, changed)
        )
    assert torch.equal(a[:, :15], b[:, :15])
    assert not torch.equal(a[:, 15:], b[:, 15:])


def under_a_mask(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cut: int
) -> torch.Tensor:
    """Logits of a PagedCache under a 4-D mask, in two steps; those of a DynamicCache are equal."""
    outs = []
    for attention, cache in (
        ("sdpa", DynamicCache(config=model.config)),
        ("hf_paged", PagedCache(config=model.config, block_size=4)),
    ):
        model.set_attn_implementation(attention)
        logits = []
        for start, stop in ((0, cut), (cut, ids.shape[1])):
            with torch.no_grad():
                out = model(
                    input_ids=ids[:, start:stop],
                    attention_mask=mask[:, :, start:stop, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                )
            logits.append(out.logits)
        outs.append(torch.cat(logits, 1))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)
    assert sum(cache.report().dense_calls.values()) == 2 * model.config.num_hidden_layers
    return outs[1]


def test_custom_4d_mask_takes_the_dense_path(tiny_model: Build) -> None:
    """A tree of two branches behind a shared trunk, as speculative decoding verifies it."""
    model = tiny_model("llama")
    ids = ragged_ids([10])["input_ids"]
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool).tril()
    mask[..., 8:, 6:8] = False  # columns 8, 9 are a branch that does not see columns 6, 7
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 6, 7]])
    found = under_a_mask(model, ids, mask, positions, cut=6)
    branch = torch.tensor([0, 1, 2, 3, 4, 5, 8, 9])
    alone = model(input_ids=ids[:, branch], use_cache=False).logits
    torch.testing.assert_close(found[:, branch], alone, atol=1e-4, rtol=1e-4)


PACKED = [[4, 6, 3], [7, 2, 4]]  # the lengths of the sequences in each row
# Where transformers mixes them: its masks are not told the positions; its chunks are the row's.
MIXED_UP = {"gpt_oss"} | (
    {"llama4_text"} if Version(transformers.__version__) < Version("5.24") else set()
)


def packed_positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in PACKED])


def packed_alone(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits of each packed sequence by itself, where it is in its row."""
    with torch.no_grad():
        rows = [
            [model(input_ids=part[None], use_cache=False).logits for part in row.split(lengths)]
            for row, lengths in zip(ids, PACKED, strict=True)
        ]
    return torch.cat([torch.cat(row, 1) for row in rows])


@pytest.mark.parametrize("cut", [5, 12])
def test_packed_sequences_under_a_mask_stay_apart(tiny_model: Build, cut: int) -> None:
    """The step goes on within a sequence, with many tokens or with one."""
    model = tiny_model("llama")
    ids = ragged_ids([13, 13])["input_ids"]
    blocks = [torch.block_diag(*[torch.ones(n, n) for n in lengths]) for lengths in PACKED]
    mask = torch.stack(blocks)[:, None].bool().tril()
    found = under_a_mask(model, ids, mask, packed_positions(), cut)
    torch.testing.assert_close(found, packed_alone(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TINY)
def test_packed_sequences_by_their_positions(tiny_model: Build, name: str) -> None:
    """transformers tells them apart without a cache; to any cache of its a row is one sequence."""
    model = tiny_model(name)
    ids, positions = ragged_ids([13, 13])["input_ids"], packed_positions()

    def logits(attention: str, cache: object) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            return model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            ).logits

    apart = logits("eager", None)
    torch.testing.assert_close(logits("hf_paged", None), apart, atol=1e-4, rtol=1e-4)
    if name not in MIXED_UP:
        torch.testing.assert_close(packed_alone(model, ids), apart, atol=1e-4, rtol=1e-4)
    whole = logits("eager", DynamicCache(config=model.config))
    found = logits("hf_paged", PagedCache(config=model.config, block_size=4))
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_masked_past_takes_the_dense_path(tiny_model: Build) -> None:
    """A mask that hides stored tokens later on is obeyed, though they are in the blocks."""
    model = tiny_model("llama")
    ids = ragged_ids([10, 10])["input_ids"]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 2:5] = 0
    outs = []
    for attention, cache in (
        ("sdpa", DynamicCache(config=model.config)),
        ("hf_paged", PagedCache(config=model.config, block_size=4)),
    ):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(input_ids=ids[:, :9], past_key_values=cache)
            outs.append(
                model(input_ids=ids[:, 9:], attention_mask=mask, past_key_values=cache).logits
            )
    torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)


def test_right_padding_and_holes_are_not_stored(tiny_model: Build) -> None:
    """Padding anywhere is left out, and what is stored is still exact, windows included."""
    for name in TINY:
        model = tiny_model(name)
        ids = ragged_ids([12, 12], seed=3)["input_ids"]
        mask = torch.ones(2, 13, dtype=torch.long)
        mask[0, 9:12], mask[1, 3:5] = 0, 0
        outs = []
        for attention, cache in (
            ("eager", DynamicCache(config=model.config)),
            ("hf_paged", PagedCache(config=model.config, block_size=4)),
        ):
            model.set_attn_implementation(attention)
            with torch.no_grad():
                model(input_ids=ids, attention_mask=mask[:, :12], past_key_values=cache)
                out = model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
            outs.append(out.logits)
        torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)
        assert cache.row_lengths == [10, 11]
        assert all(reason.startswith("softcap") for reason in cache.report().dense_calls)


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_padding_stays_padding_without_a_mask(tiny_model: Build, backend: str) -> None:
    """A call without a mask after a padded one sees what one with a mask sees, on every path."""
    model = tiny_model("gemma3_text")
    model.set_attn_implementation("hf_paged")
    inputs = ragged_ids([12, 5])
    token, positions = inputs["input_ids"][:, -1:], torch.tensor([[12], [5]])
    outs = []
    for mask in (torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1), None):
        cache = PagedCache(config=model.config, block_size=4, backend=backend)
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            outs.append(
                model(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
            )
    torch.testing.assert_close(outs[0].logits, outs[1].logits, atol=1e-5, rtol=1e-5)


def test_padding_behind_a_row_that_fills_its_table(tiny_model: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    ids = ragged_ids([129, 129])["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 0], mask[1, -1] = 0, 0
    cache = PagedCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.row_lengths == [128, 128]
    assert not cache.layers[0].keys[0, :, 0].any()
    assert not cache.layers[0].keys[1, :, -1].any()


def test_blocks_made_in_inference_mode_serve_outside_of_it() -> None:
    model = tiny("llama")
    model.set_attn_implementation("hf_paged")
    cache = PagedCache(config=model.config, num_blocks=8)
    ids = ragged_ids([20])["input_ids"]
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    assert cache.row_lengths == [40]


def test_a_mask_on_its_way_to_another_device_stays_lazy() -> None:
    """accelerate moves a layer's arguments to its device; a built mask would be read as a mask."""
    facts = MaskFacts(1, 2, 2, 0, Pattern("sliding", 4))
    mask = LazyMask(facts, torch.bool, "cpu", lambda: torch.ones(1, 1, 2, 2, dtype=torch.bool))
    moved = mask.to("meta", non_blocking=True)
    assert isinstance(moved, LazyMask)
    assert moved.device.type == "meta"
    assert moved.facts is facts
    assert moved.densify().device.type == "meta"
    assert not isinstance(mask.to(torch.float32), LazyMask)


@pytest.mark.parametrize("backend", ["cpu", "dense"])
def test_chunks_of_padding_only(tiny_model: Build, backend: str) -> None:
    """No block exists yet where the second chunk looks back."""
    model = tiny_model("llama")
    model.set_attn_implementation("hf_paged")
    ids = torch.zeros(1, 4, dtype=torch.long)
    cache = PagedCache(config=model.config, backend=backend)
    with torch.no_grad():
        for columns in (2, 4):
            mask = torch.zeros(1, columns, dtype=torch.long)
            out = model(ids[:, :2], attention_mask=mask, past_key_values=cache)
            assert out.logits.isfinite().all()
    assert (cache.get_seq_length(), cache.row_lengths) == (4, [0])
