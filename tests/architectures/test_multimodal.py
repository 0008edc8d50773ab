"""Vision- and audio-language models, with images or audio in the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from hf_paged import PagedCache

from .compare import Inputs, Result, beams, compare, conversation, decode_path, greedy, groups
from .models import is_tested
from .zoo import build, tiny_config

SECTION = "Vision and audio models"
MEDIA = 98  # the id that stands for an image or a sound in the prompt
CLIP = {"image_size": 16, "patch_size": 8}  # 2 x 2 patches
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
LLAMA = {
    "model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SIGLIP = {
    **CLIP, "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
CLIP_VISION = {**SIGLIP, "model_type": "clip_vision_model"}


def prompt(media: int, width: int = 24, padding: int = 5) -> Inputs:
    """Two prompts with `media` placeholders each; the second is padded on the left."""
    ids = torch.randint(3, 90, (2, width), generator=torch.Generator().manual_seed(1))
    ids[:, padding + 2 : padding + 2 + media] = MEDIA
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def with_types(inputs: Inputs) -> Inputs:
    """token_type_ids that mark the placeholders."""
    return {**inputs, "token_type_ids": (inputs["input_ids"] == MEDIA).long()}


def grids(inputs: Inputs) -> Inputs:
    """Two images of 4 x 4 patches, merged two by two."""
    types = (inputs["input_ids"] == MEDIA).int()
    return {**inputs, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": types}


def patches(channels: int, size: int, frames: int) -> torch.Tensor:
    return images(32, channels * size * size * frames)


@dataclass
class Case:
    """A model class, what its config needs besides the rule, and its inputs."""

    kind: str
    inputs: Callable[[], Inputs]
    config: dict[str, Any] = field(default_factory=dict)
    turns: bool = True  # whether a second turn without media is a prompt it takes
    attention: str | None = "hf_paged"  # None where it looks that up in a table of its own


QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8}
CASES: dict[str, Case] = {
    "llava": Case(
        "LlavaForConditionalGeneration",
        lambda: {**prompt(4), "pixel_values": images(2, 3, 16, 16)},
        {"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_id": MEDIA,
         "vision_feature_layer": -1},
    ),
    "qwen2_vl": Case(
        "Qwen2VLForConditionalGeneration",
        lambda: {**grids(prompt(4)), "pixel_values": patches(3, 8, 2)},
        {"image_token_id": MEDIA, "video_token_id": 97, "vision_config": QWEN_VISION,
         "text_config": {"rope_parameters": ROPE}},
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        lambda: {**grids(prompt(4)), "pixel_values": patches(3, 8, 2)},
        {"image_token_id": MEDIA, "video_token_id": 97, "text_config": {"rope_parameters": ROPE},
         "vision_config": {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64,
                           "window_size": 32, "fullatt_block_indexes": [1]}},
    ),
    "qwen3_vl": Case(
        "Qwen3VLForConditionalGeneration",
        lambda: {**grids(prompt(4)), "pixel_values": patches(3, 8, 2)},
        {"image_token_id": MEDIA, "video_token_id": 97, "text_config": {"rope_parameters": ROPE},
         "vision_config": {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64,
                           "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        lambda: {**with_types(prompt(4)), "pixel_values": images(2, 3, 16, 16)},
        {"image_token_index": MEDIA, "mm_tokens_per_image": 4, "vision_config": SIGLIP},
        turns=False,
    ),
    "paligemma": Case(
        "PaliGemmaForConditionalGeneration",
        lambda: {**with_types(prompt(4)), "pixel_values": images(2, 3, 16, 16)},
        {"image_token_index": MEDIA, "vision_config": {**SIGLIP, "projection_dim": 64},
         "text_config": {**LLAMA, "model_type": "gemma"}, "projection_dim": 64},
        turns=False,
    ),
    "idefics2": Case(
        "Idefics2ForConditionalGeneration",
        lambda: {**prompt(4), "pixel_values": images(2, 1, 3, 16, 16)},
        {"image_token_id": MEDIA, "vision_config": {**CLIP, "hidden_size": 64},
         "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
         "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1,
                              "resampler_n_heads": 2, "resampler_head_dim": 16,
                              "num_key_value_heads": 1, "hidden_size": 64}},
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        lambda: {**prompt(4), "pixel_values": images(2, 1, 3, 16, 16)},
        {"image_token_id": MEDIA, "scale_factor": 1, "text_config": LLAMA,
         "vision_config": {**CLIP, "hidden_size": 64}},
    ),
    "mllama": Case(
        "MllamaForConditionalGeneration",
        lambda: {
            **prompt(1),
            "pixel_values": images(2, 1, 2, 3, 16, 16),
            "aspect_ratio_ids": torch.tensor([[1], [2]]),
            "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 24, 1, 2, dtype=torch.long),
        },
        {"image_token_index": MEDIA,
         "vision_config": {**CLIP, "hidden_size": 16, "intermediate_size": 32, "attention_heads": 2,
                           "num_hidden_layers": 2, "num_global_layers": 1, "max_num_tiles": 2,
                           "intermediate_layers_indices": [0, 1], "vision_output_dim": 48,
                           "supported_aspect_ratios": [[1, 1], [1, 2]]},
         "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1],
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}},
        turns=False,
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        lambda: {**prompt(4), "pixel_values": images(2, 3, 32, 32)},
        {"image_token_id": MEDIA, "text_config": {**LLAMA, "model_type": "qwen2"},
         "vision_config": {"image_size": [32, 32], "patch_size": [8, 8], "num_hidden_layers": 2,
                           "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}},
    ),
    "git": Case(
        "GitForCausalLM",
        lambda: {**prompt(0), "pixel_values": images(2, 3, 16, 16)},
        {"vision_config": {**CLIP, "hidden_size": 64}},
        turns=False,
        attention=None,
    ),
    "qwen2_audio": Case(
        "Qwen2AudioForConditionalGeneration",
        lambda: {
            **prompt(10),
            "input_features": images(2, 8, 40),
            "feature_attention_mask": torch.ones(2, 40, dtype=torch.long),
        },
        {"audio_token_index": MEDIA, "text_config": {**LLAMA, "model_type": "qwen2"},
         "audio_config": {"num_mel_bins": 8, "d_model": 32, "encoder_layers": 2,
                          "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
                          "max_source_positions": 20}},
    ),
}  # fmt: skip
SAMPLE = ("llava", "gemma3")
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow)
    for name in filter(is_tested, CASES)
]


def tiny(name: str, attention: str | None = None) -> PreTrainedModel:
    make = getattr(transformers, CASES[name].kind)._from_config
    return build(make, tiny_config(name, CASES[name].config), attention)


@pytest.mark.parametrize("name", NAMES)
def test_equals_dynamic_cache(name: str, note: Callable[[Result], None]) -> None:
    case, result = CASES[name], Result(SECTION, name)
    models = tiny(name), tiny(name, case.attention)
    if case.attention is None:
        with pytest.raises(KeyError, match="hf_paged"):
            tiny(name, "hf_paged")
        result.remarks.append("not with hf_paged attention")
    config = models[0].config
    runs = [greedy, beams, conversation] if case.turns else [greedy, beams]
    for run in runs:
        caches = DynamicCache(config=config), PagedCache(config=config, block_size=4)
        compare(run, models, caches, case.inputs())
    cache = PagedCache(config=config, block_size=4)
    result.path = decode_path(models[1], cache, cache, case.inputs())
    result.groups = groups(cache)
    note(result)


@pytest.mark.parametrize("name", NAMES)
def test_the_media_matter(name: str) -> None:
    """Other pixels or sounds give other logits: the prompt is not just its text."""
    model, logits = tiny(name), []
    for sign in (1, -1):
        inputs = CASES[name].inputs()
        media = "input_features" if "input_features" in inputs else "pixel_values"
        inputs[media] = sign * inputs[media]
        logits.append(greedy(model, DynamicCache(config=model.config), inputs).logits[0])
    assert (logits[0] - logits[1]).abs().max() > 1e-2
