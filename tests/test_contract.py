"""What transformers' `Cache` and its layers tell who reads them: a PagedCache tells the same.

The names are those that the real objects have, so what a later transformers adds shows up here.
Each is asked of a DynamicCache and of a PagedCache in front of, within (by hooks on every part of
every layer) and behind the forwards and moves of one script. The answers are equal, or it is said
here why not. (What is put in by `update` alone, without a model, shows when all layers have it:
nothing tells an update that others follow from one whose forward has failed.)
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from architectures.models import BASELINE, OTHER_ATTENTION, OVERRIDES
from architectures.zoo import build, tiny_config
from interrupts import interrupt
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_paged import PagedCache

# Full attention, windows, chunks, two kinds, an indexer, K/V that layers share; recurrent layers,
# and those that are also attention, without and with a window: all kinds of layers of DynamicCache.
MODELS = ("llama", "mistral", "llama4_text", "gemma3_text", "deepseek_v32", "gemma4_text")
RECURRENT = ("jamba", "falcon_h1", "inkling_text")
Ask = Callable[[Any], Any]
# Methods that answer, by how they are called; whatever is no method is read.
QUESTIONS: dict[str, Ask] = {
    "get_max_length": lambda one: one.get_max_length(),
    "get_seq_length": lambda one: one.get_seq_length(),
    "get_query_offset": lambda cache: cache.get_query_offset(),
    "get_mask_sizes": lambda one: (
        one.get_mask_sizes(3, 0) if isinstance(one, Cache) else one.get_mask_sizes(3)
    ),
    "get_conv_state": lambda cache: cache.get_conv_state(0),
    "get_recurrent_state": lambda cache: cache.get_recurrent_state(0),
    "has_previous_state": lambda one: (
        one.has_previous_state() if isinstance(one, Cache) else one.has_previous_state
    ),
    "is_recording_past": lambda cache: [cache.is_recording_past(i) for i in range(len(cache))],
}
# Methods that do something: what the script calls, and what models call to keep other states.
DEEDS = {
    *("update", "crop", "reset", "reorder_cache", "batch_select_indices"),
    *("batch_repeat_interleave", "activate_past_recording", "update_indexer"),
    *("update_conv_state", "update_recurrent_state", "lazy_initialization_indexer"),
}
DIFFERENT = {
    "batch_size": "a DynamicCache does not know it: it says -1",
    "layers": "are of other classes, and asked one by one",
    "offload": "moves a whole cache out of its pool, not a layer to the CPU",
    "prefetch": "is restore() here, of a whole cache",
    "early_initialization": "does nothing: blocks are allocated with the first K/V",
    "lazy_initialization": "does nothing, for the same reason",
}
# What one layer of a DynamicCache does alone and a PagedCache does for all its layers at once.
OF_ALL_LAYERS: dict[str, tuple[Any, ...]] = {
    "crop": (-1,),
    "reset": (),
    "reorder_cache": (torch.tensor([1, 0]),),
    "batch_select_indices": (torch.tensor([0]),),
    "batch_repeat_interleave": (2,),
    "offload": (),
    "prefetch": (),
}
PADDING = 4
IDS = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(0))


def tiny(name: str) -> PreTrainedModel:
    config = tiny_config(name, OVERRIDES.get(name, {}))
    attention = BASELINE.get(name) if name in OTHER_ATTENTION else "hf_paged"
    return build(AutoModelForCausalLM.from_config, config, attention)


@dataclass
class Script:
    """Forwards and moves of a cache, which is asked everything at each moment.

    Attributes:
        moments: (when, the answers of the cache and of each layer), in order.
        names: for each moment the names to ask for, if not all.
    """

    model: PreTrainedModel
    cache: Cache
    names: list[list[set[str]]] | None = None
    moments: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.padding = [0, PADDING]
        self.mask = torch.ones(2, 0, dtype=torch.long)
        self.ask("when it is new")

    def ask(self, when: str) -> None:
        names = None if self.names is None else self.names[len(self.moments)]
        ones = [self.cache, *self.cache.layers]
        self.moments.append(
            (when, [self.answers(one, names and names[at]) for at, one in enumerate(ones)])
        )

    def answers(self, one: Any, names: set[str] | None) -> dict[str, Any]:
        """Name -> answer, or the kind of error that is raised."""
        found: dict[str, Any] = {}
        for name in names or {name for name in dir(one) if not name.startswith("_")}:
            if name in DEEDS or name in DIFFERENT:
                continue
            try:
                answer = QUESTIONS.get(name, lambda one, name=name: getattr(one, name))(one)
            except (ValueError, AttributeError) as error:
                answer = type(error)
            assert isinstance(answer, type) or not callable(answer), f"{name} is in no table"
            if name in ("keys", "values") and isinstance(answer, torch.Tensor) and names is None:
                answer = self.as_paged(one, answer)
            found[name] = copy.deepcopy(answer)
        return found

    def as_paged(self, layer: Any, states: torch.Tensor) -> torch.Tensor:
        """A DynamicCache's K or V but for what a PagedCache does not show.

        It stores no padding, and shows zeros. While the past is recorded it holds what crop may
        need again, and shows what the next query sees.
        """
        if getattr(layer, "record_past", False):
            states = states[:, :, -layer.sliding_window + 1 :]
        columns = layer.get_seq_length()
        is_token = torch.arange(columns) >= torch.tensor(self.padding)[:, None]
        return states * is_token[:, None, columns - states.shape[2] :, None]

    def forward(self, when: str, new: int) -> None:
        """One forward; every part of every layer asks before and behind its own."""
        ids = torch.cat([IDS, IDS.flip(1)], 1)[:, self.mask.shape[1] :][:, :new]
        ids = ids[:1].expand(len(self.padding), -1)
        grown = torch.arange(self.mask.shape[1] + ids.shape[1])
        self.mask = (grown >= torch.tensor(self.padding)[:, None]).long()
        hooks = []
        for name, part in self.model.named_modules():
            if re.search(r"\.layers\.\d+(\.\w+)?$", name):
                ask = partial(self._from_hook, f"{when}, {name}")
                hooks.append(part.register_forward_pre_hook(partial(ask, "before")))
                hooks.append(part.register_forward_hook(partial(ask, "behind")))
        try:
            with torch.no_grad():
                self.model(ids, attention_mask=self.mask, past_key_values=self.cache)
        finally:
            for hook in hooks:
                hook.remove()
        self.ask(f"after {when}")

    def _from_hook(self, when: str, where: str, *args: Any) -> None:
        self.ask(f"{where} {when}")

    def move(self, when: str, rows: list[int], do: Callable[[], None]) -> None:
        do()
        self.padding = [self.padding[row] for row in rows]
        self.ask(when)

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]
        self.ask(f"after crop(-{count})")

    def reset(self) -> None:
        self.cache.reset()
        self.mask = self.mask[:, :0]
        self.ask("after reset()")


def run(script: Script, is_recurrent: bool) -> Script:
    cache = script.cache
    script.forward("the prompt", 13)
    script.forward("a decode step", 1)
    script.forward("a chunk", 3)
    script.move("reordered", [1, 0], lambda: cache.reorder_cache(torch.tensor([1, 0])))
    script.forward("a step of reordered rows", 1)
    if not is_recurrent:  # what transformers' own recurrent layers cannot do
        script.move(
            "selected", [0, 0, 1], lambda: cache.batch_select_indices(torch.tensor([0, 0, 1]))
        )
        script.move("repeated", [0, 0, 1, 1, 2, 2], lambda: cache.batch_repeat_interleave(2))
        script.forward("a step of more rows", 1)
        cache.activate_past_recording()
        script.ask("recording the past")
        script.forward("a recorded chunk", 4)
        script.forward("another", 2)
        script.crop(3)
        script.crop(0)
        script.forward("a step behind crop", 1)
        script.crop(script.mask.shape[1])
    script.reset()
    script.forward("a prompt after reset()", 5)
    return script


def same(found: Any, expected: Any) -> bool:
    """Equality, of numbers within rounding."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and (found.shape, found.dtype, found.device)
            == (expected.shape, expected.dtype, expected.device)
            and torch.allclose(found, expected, atol=3e-4, rtol=0)
        )
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[key], value) for key, value in expected.items()
        )
    return bool(found == expected)


@pytest.mark.parametrize("name", [*MODELS, *RECURRENT])
def test_a_paged_cache_tells_what_a_dynamic_cache_tells(name: str) -> None:
    """Models and hooks that ask how long a cache is, or read its K/V, were told otherwise."""
    model, is_recurrent = tiny(name), name in RECURRENT
    expected = run(Script(model, DynamicCache(config=model.config)), is_recurrent).moments
    names = [[set(answers) for answers in moment] for _, moment in expected]
    cache = PagedCache(config=model.config, block_size=4)
    found = run(Script(model, cache, names), is_recurrent).moments
    wrong = [
        f"{when}: {'the cache' if at == 0 else f'layer {at - 1}'}.{question} is "
        f"{answers.get(question)!r:.200}, not {answer!r:.200}"
        for (when, ours), (_, theirs) in zip(found, expected, strict=True)
        for at, (answers, known) in enumerate(zip(ours, theirs, strict=True))
        for question, answer in known.items()
        if not same(answers.get(question), answer)
    ]
    assert not wrong, "\n".join(wrong[:20])
    assert [when for when, _ in found] == [when for when, _ in expected]


@pytest.mark.parametrize("name", [*MODELS, *RECURRENT])
def test_layers_are_of_the_same_kinds(name: str) -> None:
    """Code that asks whether a layer has a window was told that it has none."""
    config = tiny(name).config
    kinds = (
        *(CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer),
        *(LinearAttentionCacheLayerMixin, DummyLayer),
    )
    for theirs, ours in zip(
        DynamicCache(config=config).layers, PagedCache(config=config).layers, strict=True
    ):
        for kind in kinds:
            assert isinstance(ours, kind) == isinstance(theirs, kind), (type(theirs), kind)


@pytest.mark.parametrize("name", OF_ALL_LAYERS)
def test_what_one_layer_cannot_do_alone_is_refused(name: str) -> None:
    """`layers[0].crop(-1)` did nothing, and said nothing."""
    cache = PagedCache(config=tiny("llama").config)
    layer, call = cache.layers[0], "restore" if name == "prefetch" else name
    states = torch.ones(2, 2, 3, 16)
    for each in cache.layers:
        each.update(states, states)
    with pytest.raises(NotImplementedError, match=rf"layer 0 cannot .*; call cache\.{call}\("):
        getattr(layer, name)(*OF_ALL_LAYERS[name])
    assert torch.equal(layer.keys, states)
    getattr(cache, call)(*OF_ALL_LAYERS[name])


# The part of each model whose end is between two layers' updates; these models ask the cache for
# its length from within their layers or embeddings.
ASKING = {
    "roformer": "roformer.encoder.layer.0",
    "mpt": "transformer.blocks.0",
    "prophetnet": "prophetnet.decoder.layers.0",
    "llama4_text": "model.layers.0",
    "llama": "model.layers.0",
}


@pytest.mark.parametrize("is_asked", [False, True], ids=["at once", "asked in between"])
@pytest.mark.parametrize("name", ASKING)
def test_what_follows_a_forward_that_failed_goes_on_from_before_it(
    name: str, is_asked: bool
) -> None:
    """A layer that shows the tokens of its forward must not show them to the next forward."""
    model = tiny(name)
    caches = DynamicCache(config=model.config), PagedCache(config=model.config)
    cache = caches[1]
    ids, seen = IDS[:1], []
    with torch.no_grad():
        for each in caches:
            model(ids[:, :5], past_key_values=each)
        fails = model.get_submodule(ASKING[name]).register_forward_hook(interrupt)
        look = model.get_submodule(ASKING[name]).register_forward_hook(
            lambda *args: seen.append((cache.get_seq_length(0), cache.get_seq_length(1))),
            prepend=True,
        )
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 5:6], past_key_values=cache)
        fails.remove()
        if is_asked:
            assert (cache.get_seq_length(), cache.get_seq_length(0)) == (5, 5)
            assert cache.layers[0].keys.shape[2] == 5
        expected, found = (model(ids[:, 5:6], past_key_values=each).logits for each in caches)
        look.remove()
    assert seen[0] == (6, 5)  # the hook is in the forward that fails
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)


DISTURBING: dict[str, Callable[[PagedCache], Any]] = {
    "crop": lambda cache: cache.crop(-1),
    "reset": lambda cache: cache.reset(),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "fork": lambda cache: cache.fork(),
    "edit": lambda cache: cache.edit(0).__enter__(),
    "offload": lambda cache: cache.offload(),
    "pickle": lambda cache: pickle.dumps(cache),
    "free_rows": lambda cache: cache.free_rows(torch.tensor([0])),
}


@pytest.mark.parametrize("name", DISTURBING)
def test_what_would_disturb_the_forward_that_calls_it_is_refused(name: str) -> None:
    """A hook that cropped or forked the cache took the step from the layers in front of it."""
    model = tiny("llama")
    caches = DynamicCache(config=model.config), PagedCache(config=model.config)

    def disturb(*args: Any) -> None:
        with pytest.raises(RuntimeError, match=r"in the middle of a forward"):
            DISTURBING[name](caches[1])

    with torch.no_grad():
        logits = []
        for cache in caches:
            model(IDS[:1, :6], past_key_values=cache)
            if cache is caches[1]:
                hook = model.model.layers[0].register_forward_hook(disturb)
            logits.append(model(IDS[:1, 6:], past_key_values=cache).logits)
    hook.remove()
    torch.testing.assert_close(logits[1], logits[0], atol=3e-4, rtol=0)
    caches[1].pool.check()
    DISTURBING[name](caches[1])
