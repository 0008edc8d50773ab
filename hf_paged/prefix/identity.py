"""What K/V depend on besides the tokens: the model, its adapters, and what the caller names.

The parts are text, each under its own name, so that two different things never make one key, and
the same in each process.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import weakref
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..core.model_spec import ModelSpec, decoder_config, paged_windows
from ..serialization import Unfit
from .circumstances import Watched, may_change_states, watched

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a config says without changing any K/V, each bit of which tests/architectures/test_configs.py
# compares with and without. All else counts, also what another order of sums comes from.
IRRELEVANT = {
    # where it comes from, and the dtype, which is that of the weights
    *("architectures", "dtype", "task_specific_params", "torch_dtype", "transformers_version"),
    # what a call returns and keeps
    *("num_logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("return_dict", "use_cache"),
    # heads, which come behind the last layer
    *("classifier_activation", "classifier_bias", "classifier_dropout", "classifier_dropout_prob"),
    *("final_logit_softcapping", "id2label", "label2id", "lm_head_bias", "lm_head_multiplier"),
    *("logit_scale", "logits_mup_width_multiplier", "logits_scaling", "logits_soft_cap"),
    *("num_labels", "problem_type", "summary_activation", "summary_first_dropout"),
    *("summary_last_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    "tie_word_embeddings",
    # chance and losses, in training only
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
    *("decoder_layerdrop", "dropout", "dropout_p", "dropout_rate", "emb_pdrop", "embd_pdrop"),
    *("embed_dropout", "embedding_dropout", "encoder_layerdrop", "hidden_dropout"),
    *("hidden_dropout_prob", "layerdrop", "mlp_dropout", "resid_dropout"),
    *("gradient_checkpointing", "resid_pdrop", "residual_dropout"),
    *("aux_loss_coef", "disable_ngram_loss", "mtp_loss_scaling_factor", "router_aux_loss_coef"),
    *("router_z_loss_coef", "z_loss_coefficient"),
    # what weights are before any is loaded
    *("embedding_initializer_range", "init_std", "initializer_cutoff_factor", "initializer_factor"),
    *("initializer_range", "learnable_sink_init"),
    # which tokens generate begins and ends with, and how it looks for them
    *("begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id"),
    *("eod_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("pad_token_id", "sep_token_id", "suppress_tokens"),
    *("bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "length_penalty"),
    *("max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
    *("encoder_no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty"),
    *("top_p", "typical_p"),
}

# Where some of these count all the same.
RELEVANT = {
    "initializer_range": {"dory"},  # which divides by it
    "pad_token_id": {  # behind which positions begin
        *("camembert", "data2vec-text", "fsmt", "kosmos_2_5_text_model", "kosmos_2_text_model"),
        *("m2m_100", "nllb-moe", "prophetnet", "roberta", "roberta-prelayernorm", "seamless_m4t"),
        *("seamless_m4t_v2", "speech_to_text", "speecht5", "trocr", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod"),
    },
}

_version = attrgetter("_version")

ExtraKey = str | int | bytes | tuple["ExtraKey", ...] | None


class ModelIdentity:
    """What the K/V of a pool are of: a config and, where the model itself is known, its weights.

    Args:
        config: of the whole model.
        model: the model, if more than its config is known.

    Attributes:
        spec: what the config says of the layers.
    """

    def __init__(self, config: PreTrainedConfig, model: torch.nn.Module | None):
        self.spec, self._model = ModelSpec(config), model
        self._watched = Watched([], [])  # of the model, as `identity` last found it
        self._note_config()

    @property
    def device(self) -> torch.device | None:
        """Where the model is, if it is known."""
        return None if self._model is None else next(self._model.parameters()).device

    @property
    def dtype(self) -> torch.dtype | None:
        """What the model computes in, if it is known."""
        return getattr(self._model, "dtype", None)

    def identity(self) -> str:
        """What K/V depend on besides tokens and extra keys: config, and weights where known.

        Raises:
            ValueError: layers look back on other numbers of tokens than when this was made, or the
                weights cannot be read.
        """
        config = self.spec.whole_config
        if config_facts(config) != self._facts:
            if paged_windows(decoder_config(config)) != self.spec.windows:
                raise ValueError(
                    "The layers in the model's config, or their windows, are no longer those that "
                    "the pool was made for; make a new pool."
                )
            self.spec = ModelSpec(config)
            self._note_config()
        weights, adapters = None, None
        if self._model is not None:
            weights, adapters, self._watched = read_model(self._model)
        return json.dumps({"config": self._fingerprint, "weights": weights, "adapters": adapters})

    def _note_config(self) -> None:
        config = self.spec.whole_config
        self._facts = copy.deepcopy(config_facts(config))
        self._fingerprint = config_fingerprint(config)

    def is_altered(self) -> bool:
        """Whether the model, where it is known, may compute other K/V than its weights say now."""
        return may_change_states(self._watched)


def config_facts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """All that a config and those in it say, for a quick comparison."""
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    own = {n: v for n, v in vars(config).items() if not isinstance(v, PreTrainedConfig)}
    return [own, *(facts for part in parts for facts in config_facts(part))]


def config_fingerprint(config: PreTrainedConfig) -> str:
    """Text of a whole model's config, without what changes no K/V."""
    return json.dumps(_entries(config, decodes=True), sort_keys=True, default=_text)


def _entries(config: PreTrainedConfig, decodes: bool) -> dict[str, Any]:
    """What a config says; of one that `decodes`, what counts. A newer version's fields are None."""
    kind = config.model_type
    entries = {
        name: value
        for name, value in config.to_dict().items()
        if value is not None
        and not name.startswith("_")
        and not (decodes and name in IRRELEVANT and kind not in RELEVANT.get(name, ()))
    }
    decoder = config.get_text_config(decoder=True) if decodes else None
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            leads_there = decodes and part.get_text_config(decoder=True) is decoder
            entries[name] = _entries(part, leads_there)
    return entries


def _text(value: Any) -> Any:
    """What JSON has no form for, without the addresses that a process has it at."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__dict__") and type(value).__str__ is object.__str__:
        return {type(value).__qualname__: vars(value)}
    return str(value)


def refusal(saved: str, own: str) -> str | None:
    """Why K/V of the identity `saved` are not for a pool of the identity `own`, if they are not.

    Which weights computed K/V must be known on both sides or on none: else they may be others.
    """
    theirs, ours = json.loads(saved), json.loads(own)
    if theirs["config"] != ours["config"]:
        said, here = json.loads(theirs["config"]), json.loads(ours["config"])
        if said["model_type"] != here["model_type"]:
            return f"it is of a {said['model_type']} model, not of a {here['model_type']} model"
        names = [n for n in sorted(said.keys() | here.keys()) if said.get(n) != here.get(n)]
        return f"it is of a model whose config has other values for {', '.join(names)}"
    if theirs["weights"] is None and ours["weights"] is not None:
        return (
            "its pool was made from a config, so it does not say which weights computed it; load "
            "it for the model's config, not for the model"
        )
    if theirs["weights"] is not None and ours["weights"] is None:
        return (
            "it says which weights computed it, and a config does not say whether the model has "
            "these; load it for the model, not for its config"
        )
    if theirs["weights"] != ours["weights"]:
        return "it was computed by other weights"
    if theirs["adapters"] != ours["adapters"]:
        return "it was computed with other adapters, or with these in another state"
    return None


def check_identity(saved: str, own: str) -> None:
    """Raise Unfit if K/V of the identity `saved` are not for a pool of the identity `own`."""
    reason = refusal(saved, own)
    if reason is not None:
        raise Unfit(reason)


class _State:
    """A model as it was when its weights were read; it keeps no part of it alive."""

    def __init__(self, model: torch.nn.Module):
        modules, self._tree, weights = _parts(model)
        self._died: list[Any] = []  # with all alive, no other has the address of one
        self._alive = [weakref.ref(weight, self._died.append) for weight in weights]
        self._addresses = list(map(id, weights))
        self._places = _places(weights)
        # Layers that PEFT has wrapped; models have methods of that name.
        self._adapters = [
            weakref.ref(module)
            for module in modules
            if isinstance(getattr(type(module), "disable_adapters", None), property)
        ]
        self.digest = _digest(model)

    def is_current(self, parts: _Parts) -> bool:
        """Whether the model still has the same weights in the same places, none written since."""
        return (
            not self._died
            and parts.tree == self._tree
            and list(map(id, parts.weights)) == self._addresses
            and self._places is not None
            and _places(parts.weights) == self._places
        )

    def adapters(self) -> list[list[str]]:
        """Of each wrapped layer what it now adds to its output."""
        layers: list[Any] = [layer() for layer in self._adapters]
        parts = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
        return [[str(getattr(layer, part, None)) for part in parts] for layer in layers]


# Each model as it was when its weights were last read.
_read: weakref.WeakKeyDictionary[torch.nn.Module, _State] = weakref.WeakKeyDictionary()


class ModelFacts(NamedTuple):
    """A model as it is now.

    Attributes:
        weights: text that no other weights have, nor these under other modules.
        adapters: of each layer that PEFT has wrapped what it now adds to its output.
        watched: what to look at while it runs.
    """

    weights: str
    adapters: list[list[str]]
    watched: Watched


def read_model(model: torch.nn.Module) -> ModelFacts:
    """What a model's K/V depend on.

    The weights are read once, and again when one was written. That is told by its version, which
    PyTorch counts for all that optimizers, `load_state_dict` and in-place operations do, but not
    for what is written through `weight.data`; tensors made in inference mode have none.
    """
    state, parts = _read.get(model), _parts(model)
    if state is None or not state.is_current(parts):
        state = _read[model] = _State(model)
    return ModelFacts(state.digest, state.adapters(), watched(parts.modules))


def encode_extra_key(extra_key: ExtraKey, autocast: str | None = None) -> str:
    """Text that is different for different keys, and under another `autocast_dtype`.

    Raises:
        ValueError: the key is not None, text, an int, bytes, or a tuple of these.
    """
    return json.dumps(_tagged(extra_key) | ({} if autocast is None else {"autocast": autocast}))


def _tagged(key: Any) -> dict[str, Any]:
    if key is None or (isinstance(key, str | int) and not isinstance(key, bool)):
        return {type(key).__name__: key}
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, tuple):
        return {"tuple": [_tagged(part) for part in key]}
    raise ValueError(
        f"extra_key must be text, an int, bytes, or a tuple of these, not {key!r}; name what the "
        "K/V depend on by one of them."
    )


class _Parts(NamedTuple):
    """What a model is made of.

    Attributes:
        modules: all modules from the top down.
        tree: the kind of each, and how many children it has if it has some.
        weights: the weights of all.
    """

    modules: list[Any]
    tree: list[Any]
    weights: list[torch.Tensor]


# This is asked at each call, behind a forward that leaves nothing in the processor's caches: each
# module is looked at once, and as little of it as can be.
def _parts(model: torch.nn.Module) -> _Parts:
    modules: list[Any] = [model]
    tree: list[Any] = []
    weights: list[torch.Tensor | None] = []
    for module in modules:  # grows on the way
        tree.append(_kind(module) if "forward" in vars(module) else type(module))
        if children := module._modules:
            tree.append(len(children))
            modules += filter(None, children.values())
        if parameters := module._parameters:
            weights += parameters.values()
        if module._buffers:
            weights += _lasting_buffers(module)
    return _Parts(modules, tree, [weight for weight in weights if weight is not None])


def _kind(module: torch.nn.Module) -> str:
    """The name of a module's class, and of the function put in the place of its `forward`."""
    kind, forward = type(module), module.forward
    name = getattr(forward, "__qualname__", type(forward).__qualname__)
    own = kind.forward.__qualname__  # accelerate and torch.compile put one of the same name there
    return kind.__qualname__ if name == own else f"{kind.__qualname__} {name}"


def _lasting_buffers(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """The buffers of a module but those that it can compute anew. Rotary frequencies, which people
    edit, are among them where no forward writes them."""
    passing = module._non_persistent_buffers_set
    kinds = str(vars(module).get("rope_type"))  # one, or one for each type of layer
    if passing and "dynamic" not in kinds and "longrope" not in kinds:
        passing = {name for name in passing if not name.endswith("inv_freq")}
    return [buffer for name, buffer in module._buffers.items() if name not in passing]


def _places(weights: list[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Where each weight is and how often it was written; None if one does not tell."""
    try:
        return list(map(torch.Tensor.data_ptr, weights)), list(map(_version, weights))
    except RuntimeError:
        return None


def _digest(model: torch.nn.Module) -> str:
    """Of all bits of each weight, which stands at which place."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {_kind(module)}".encode())
        for weight in (*module._parameters.values(), *_lasting_buffers(module)):
            if weight is None:
                continue
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            try:
                parts = [part.cpu().numpy() for part in _sums(weight.detach())]
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"The weights of {name!r} ({type(weight).__name__} on {weight.device}) cannot "
                    "be read, so the pool cannot tell its model from others; make it from the "
                    "config."
                ) from error
            for part in parts:
                digest.update(part.tobytes())
    return digest.hexdigest()


def _sums(weight: torch.Tensor) -> list[torch.Tensor]:
    """The bits as a square of whole numbers: the sums of its rows and columns, and what is left.

    No number can change its place with another one unseen, for at least one of the two sums of each
    changes. Eight bytes are one number.
    """
    flat = weight.reshape(-1).contiguous()
    bits = flat.view(INTEGERS[flat.element_size()])
    width = 8 // bits.element_size()
    if bits.storage_offset() % width or bits.data_ptr() % 8:
        bits = bits.clone()  # so that the same weights give the same sums wherever they lie
    whole = len(bits) // width * width
    words, left = bits[:whole].view(torch.int64), bits[whole:]
    side = math.isqrt(len(words))
    square = words[: side * side].view(side, side)
    sums = [square.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return [*sums, words[side * side :], left]
