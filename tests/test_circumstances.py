"""What K/V depend on besides tokens and weights is noticed, and left out of the prefix index."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from conftest import ragged_ids, tiny
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig
from transformers.integrations.neftune import activate_neftune

from hf_paged import BlockPool, PagedCache
from hf_paged.prefix.identity import config_fingerprint

IDS = ragged_ids([20])["input_ids"]
OTHER = ragged_ids([20], seed=1)["input_ids"]


def llama(**overrides: Any) -> Any:
    model = tiny("llama", **overrides)
    model.set_attn_implementation("hf_paged")
    return model


def learn(pool: BlockPool, model: Any, ids: torch.Tensor = IDS, **kwargs: Any) -> int:
    """Index a prompt, and say how many of its tokens are new."""
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(input_ids=ids, past_key_values=cache, **kwargs)
        return pool.insert_prefix(cache, ids)


def hits(pool: BlockPool, ids: torch.Tensor = IDS) -> int:
    with pool.match_prefix(ids) as cache:
        return cache.get_seq_length()


# Positions


def positions(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("attention", ["hf_paged", "sdpa", "eager"])
@pytest.mark.parametrize("given", [torch.arange(3, 23), torch.arange(19, -1, -1)])
def test_other_positions_are_not_indexed(attention: str, given: torch.Tensor) -> None:
    model = llama()
    model.set_attn_implementation(attention)
    pool = BlockPool(model, block_size=4)
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(IDS, past_key_values=cache, position_ids=given[None])
        assert pool.insert_prefix(cache, IDS, attention_mask=torch.ones_like(IDS)) == 0
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(IDS, past_key_values=cache, position_ids=torch.arange(20)[None])
        assert pool.insert_prefix(cache, IDS, attention_mask=torch.ones_like(IDS)) == 20


def test_a_row_whose_padding_was_counted_as_positions_is_not_indexed() -> None:
    """A plain forward counts columns; the row without padding is right, the other is not."""
    model, inputs = llama(), ragged_ids([12, 7])
    pool = BlockPool(model, block_size=4)
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        assert pool.insert_prefix(cache, inputs["input_ids"]) == 12
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(**inputs, past_key_values=cache, position_ids=positions(inputs))
        assert pool.insert_prefix(cache, inputs["input_ids"]) == 7


def after(model: Any, inputs: dict[str, torch.Tensor], cache: PagedCache, shift: int) -> Any:
    """A padded prompt, and three tokens more at positions of which the last two are shifted."""
    ids = torch.cat([inputs["input_ids"], OTHER[:, :3].expand(2, -1)], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    at, width = positions({"attention_mask": mask}), inputs["input_ids"].shape[1]
    at[:, width + 1 :] += shift
    with torch.no_grad():
        for start, stop in ((0, width), *((n, n + 1) for n in range(width, width + 3))):
            model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=at[:, start:stop],
                past_key_values=cache,
            )
    return ids


@pytest.mark.parametrize("what", ["as it is", "selected", "forked", "cropped", "saved"])
def test_tokens_in_front_of_another_position_are_indexed(what: str, tmp_path: Path) -> None:
    """Whatever becomes of the rows, those behind stay out, until they are gone."""
    model, inputs = llama(), ragged_ids([9, 6])
    pool = BlockPool(model, block_size=4)
    cache = PagedCache(pool=pool)
    ids = after(model, inputs, cache, shift=2)
    expected = 8 + 4  # whole blocks: more tokens follow in the last ones
    if what == "selected":
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        ids = ids[[1, 0, 1]]
    elif what == "forked":
        cache = cache.fork()
    elif what == "cropped":
        cache.crop(-2)
        expected = 10 + 7
    elif what == "saved":
        cache.save(tmp_path / "cache")
        cache = PagedCache.load(tmp_path / "cache", model)
        pool = cache.pool
    assert pool.insert_prefix(cache, ids) == expected


def test_positions_of_generate_are_those_of_the_tokens() -> None:
    """Padded prompts, beams, prompt lookup and second turns are indexed as before."""
    model, inputs = llama(), ragged_ids([12, 7])
    for kwargs in ({}, {"num_beams": 2}):
        pool = BlockPool(model, block_size=4)
        with PagedCache(pool=pool) as cache:
            out = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, **kwargs)
            assert pool.insert_prefix(cache, out) == (16 if kwargs else 29)
    pool = BlockPool(model, block_size=4)
    with PagedCache(pool=pool) as cache:
        ids = IDS[:, :7].repeat(1, 3)
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=6, prompt_lookup_num_tokens=3
        )
        assert pool.insert_prefix(cache, out) == out.shape[1] - 1
        turn = torch.cat([out, OTHER[:, :5]], 1)
        out = model.generate(turn, past_key_values=cache, max_new_tokens=6)
        assert pool.insert_prefix(cache, out) == 11


# Embeddings in place of tokens


@pytest.mark.parametrize("how", ["forward", "generate", "prompt tuning"])
def test_embeddings_are_not_taken_for_the_tokens(how: str) -> None:
    model = llama()
    tuned = model
    if how == "prompt tuning":
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        tuned = get_peft_model(model, config).eval()
    pool = BlockPool(model, block_size=4)
    embeds = model.get_input_embeddings()(IDS) * 2
    sequences = IDS
    with PagedCache(pool=pool) as cache, torch.no_grad():
        if how == "forward":
            model(inputs_embeds=embeds, past_key_values=cache)
        elif how == "generate":
            sequences = model.generate(
                IDS, inputs_embeds=embeds, past_key_values=cache, max_new_tokens=3
            )
        else:
            tuned(IDS, past_key_values=cache)
            sequences = torch.cat([IDS[:, :4], IDS], 1)
        assert cache.get_seq_length() >= 20
        assert pool.insert_prefix(cache, sequences) == 0
    assert learn(pool, model) == 20


# Forward hooks


def adds(module: Any, args: Any, output: Any) -> Any:
    return output + 1


def writes(module: Any, args: Any, output: torch.Tensor) -> None:
    output.add_(1)


class Steering:
    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output + 1

    def method(self, module: Any, args: Any, output: Any) -> Any:
        return self(module, args, output)


HOOKS: dict[str, Callable[..., Any]] = {
    "returns": adds,
    "writes": writes,
    "lambda": lambda module, args, output: output + 1,
    "object": Steering(),
    "method": Steering().method,
    "partial": partial(Steering.method, Steering()),
    "wrapped": torch.no_grad()(adds),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_what_a_hook_may_have_changed_is_not_indexed(hook: Callable[..., Any]) -> None:
    model = llama()
    pool = BlockPool(model, block_size=4)
    handle = model.model.layers[1].mlp.register_forward_hook(hook)
    assert learn(pool, model) == 0
    handle.remove()
    assert hits(pool) == 0
    assert learn(pool, model) == 20


@pytest.mark.parametrize("known", [0, 8, 20])
@pytest.mark.parametrize("where", ["module", "all modules", "before"])
def test_a_hook_for_a_generate_only_is_noticed(known: int, where: str) -> None:
    """Neither the match nor the insertion sees it, and a step of one token may be its first."""
    model = llama()
    pool = BlockPool(model, block_size=4)
    if known:
        learn(pool, model, IDS[:, :known])
    layer = model.model.layers[1]
    register = {
        "module": lambda: layer.mlp.register_forward_hook(adds),
        "all modules": lambda: torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out + 1 if module is layer.mlp else None
        ),
        "before": lambda: layer.mlp.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    }[where]
    with pool.match_prefix(IDS) as cache:
        assert cache.get_seq_length() == min(known, 19)
        handle = register()
        out = model.generate(IDS, past_key_values=cache, max_new_tokens=4)
        handle.remove()
        assert pool.insert_prefix(cache, out) == 0
        assert hits(pool, out) == known
        pool.check()


def test_a_hook_in_the_middle_of_a_generate_is_noticed() -> None:
    model = llama()
    pool, layer = BlockPool(model, block_size=4), model.model.layers[1].mlp
    with PagedCache(pool=pool) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        handle = layer.register_forward_hook(adds)
        model(OTHER[:, :1], past_key_values=cache)
        handle.remove()
        model(OTHER[:, 1:2], past_key_values=cache)
        assert pool.insert_prefix(cache, torch.cat([IDS, OTHER[:, :2]], 1)) == 20


def test_hooks_that_look_on_change_nothing() -> None:
    """What people keep activations by, and transformers and accelerate themselves."""
    model = llama()
    kept: dict[str, torch.Tensor] = {}
    count = 0

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if output.shape[1] == 1:
            return
        kept["mlp"] = output.detach()

    model.model.layers[1].mlp.register_forward_hook(keep)
    with torch.no_grad():
        model(IDS, output_hidden_states=True, use_cache=False)  # installs hooks that stay
    model.enable_input_require_grads()
    activate_neftune(model, 5.0)  # which adds noise in training only
    assert model.model.layers[0]._forward_hooks
    assert model.get_input_embeddings()._forward_hooks
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    pool = BlockPool(model, block_size=4)
    assert learn(pool, model) == 20
    assert hits(pool) == 19
    assert count == 2


def test_rows_on_adapters_of_their_own_are_not_indexed() -> None:
    """`adapter_names` is told to PEFT's layers by hooks, and to nobody else."""
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config, adapter_name="one").eval()
    model.add_adapter("two", config)
    model.eval()
    pool = BlockPool(model, block_size=4)
    assert learn(pool, model, adapter_names=["two"]) == 0
    assert learn(pool, model) == 20


# Training, autocast


@pytest.mark.parametrize("how", ["model", "adapter"])
def test_what_chance_has_a_part_in_is_not_indexed(how: str) -> None:
    model = llama(attention_dropout=0.5 if how == "model" else 0.0)
    if how == "adapter":
        config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False, lora_dropout=0.5)
        model = get_peft_model(model, config)
        model.base_model.eval()
        model.get_submodule("base_model.model.model.layers.1.mlp.up_proj").train()
    else:
        model.train()
    pool = BlockPool(model, block_size=4)
    assert learn(pool, model) == 0
    model.eval()
    assert hits(pool) == 0
    assert learn(pool, model) == 20


def test_autocast_has_prefixes_of_its_own(tmp_path: Path) -> None:
    """Also where K/V have the same dtype with it and without, in files, and if it is left."""
    model, autocast = llama(), partial(torch.autocast, "cpu", torch.bfloat16)
    pool = BlockPool(model, block_size=4)
    with PagedCache(pool=pool) as cache, torch.no_grad():
        with autocast():
            model(IDS, past_key_values=cache)
        assert cache.layers[0].dtype == torch.float32
        cache.save(tmp_path / "cache")
        assert pool.insert_prefix(cache, IDS) == 20
        model(OTHER[:, :1], past_key_values=cache)
        assert pool.insert_prefix(cache, torch.cat([IDS, OTHER[:, :1]], 1)) == 0
    assert learn(pool, model, OTHER) == 20
    pool.save_prefixes(tmp_path / "prefixes")
    again = BlockPool(model, block_size=4)
    assert again.load_prefixes(tmp_path / "prefixes") == 40
    loaded = PagedCache.load(tmp_path / "cache", model)
    assert loaded.pool.insert_prefix(loaded, IDS) == 20
    for known, rows in ((pool, IDS), (again, IDS), (loaded.pool, IDS)):
        assert hits(known, rows) == 0
        with autocast():
            assert hits(known, rows) == 19
    assert hits(again, OTHER) == 19
    with autocast():
        assert hits(again, OTHER) == 0


# The model and its config


@pytest.mark.parametrize("how", ["frequencies", "activation", "forward", "rope", "scale"])
def test_an_edit_that_writes_no_weight_never_hits(how: str) -> None:
    model = llama()
    pool = BlockPool(model, block_size=4)
    learn(pool, model)
    assert hits(pool) == 19
    mlp = model.model.layers[1].mlp
    if how == "frequencies":
        model.model.rotary_emb.inv_freq /= 2
    elif how == "activation":
        mlp.act_fn = torch.nn.GELU()
    elif how == "forward":
        mlp.forward = lambda states: type(mlp).forward(mlp, states) * 2
    elif how == "rope":
        model.config.rope_parameters["rope_theta"] = 500.0
    else:
        model.config.rms_norm_eps = 0.1
    assert hits(pool) == 0
    assert learn(pool, model) == 20


def test_frequencies_that_forwards_write_do_not_count() -> None:
    """Dynamic NTK and LongRoPE write them for each length; a short prompt has always the same."""
    short, long = torch.ones(8).tolist(), torch.full((8,), 4.0).tolist()
    for rope in (
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
        {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 4.0}
        | {"rope_theta": 10_000.0, "original_max_position_embeddings": 32},
    ):
        model = llama(max_position_embeddings=32, rope_parameters=rope)
        pool = BlockPool(model, block_size=4)
        assert learn(pool, model) == 20
        identity = pool.identity()
        with torch.no_grad():
            model(ragged_ids([60])["input_ids"], past_key_values=DynamicCache(config=model.config))
        assert pool.identity() == identity
        assert hits(pool) == 19


def test_what_is_written_into_the_config_later_is_followed() -> None:
    """What changes no K/V parts nothing; other windows are none that the pool could hold."""
    model = tiny("gemma3_text")
    model.set_attn_implementation("hf_paged")
    pool = BlockPool(model, block_size=4)
    learn(pool, model)
    model.config.eos_token_id = 7
    model.config.pad_token_id = 5
    assert hits(pool) == 19
    model.config.sliding_window = 9
    with pytest.raises(ValueError, match="no longer those that the pool was made for"):
        pool.match_prefix(IDS)
    with (
        PagedCache(pool=pool) as cache,
        torch.no_grad(),
        pytest.raises(ValueError, match="make a new pool"),
    ):
        model(IDS, past_key_values=cache)
    model.config.sliding_window = 8
    assert hits(pool) == 19


def test_a_rope_that_is_made_dynamic_later_bounds_what_is_reused() -> None:
    model = llama(max_position_embeddings=32)
    pool = BlockPool(model, block_size=4)
    long = ragged_ids([40])["input_ids"]
    pool.match_prefix(long)
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match="more than 32 tokens cannot be reused"):
        pool.match_prefix(long)


@pytest.mark.parametrize("new", [1, 6])
def test_another_state_for_a_generate_only_is_noticed(new: int) -> None:
    """Neither the match nor the insertion sees it: what is known was computed with the adapter."""
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config).eval()
    pool = BlockPool(model, block_size=4)
    learn(pool, model, IDS[:, : 20 - new])
    with pool.match_prefix(IDS) as cache:
        assert cache.get_seq_length() == 20 - new
        with model.disable_adapter():
            out = model.generate(input_ids=IDS, past_key_values=cache, max_new_tokens=4)
        assert pool.insert_prefix(cache, out) == 0
    assert hits(pool, out) == 20 - new


class Thing:
    """A value that JSON has no form for, and whose text has its address."""

    def __init__(self) -> None:
        self.size = 3


def odd_config() -> LlamaConfig:
    config = LlamaConfig(num_hidden_layers=1)
    config.names, config.thing, config.function = set("abcdefgh"), Thing(), torch.relu
    config.kind, config.table = torch.float16, torch.arange(3)
    return config


def test_a_config_is_told_by_the_same_text_in_each_process() -> None:
    """No address of a value is in it, and no order of a set; and other values have another text."""
    code = (
        "from test_circumstances import odd_config\n"
        "from hf_paged.prefix.identity import config_fingerprint\n"
        "print(config_fingerprint(odd_config()))"
    )
    texts = [config_fingerprint(odd_config())]
    for seed in ("1", "2"):
        path = ":".join([str(Path(__file__).parent), *sys.path])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        found = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        texts.append(found.stdout.strip())
    assert len(set(texts)) == 1
    for name, value in (("names", {"a"}), ("function", torch.exp), ("kind", torch.float32)):
        config = odd_config()
        setattr(config, name, value)
        texts.append(config_fingerprint(config))
    config = odd_config()
    config.thing.size = 4
    assert len({*texts, config_fingerprint(config)}) == 5
