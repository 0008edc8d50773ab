"""Vision- and audio-language models, with images or sounds in the prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers import Cache, DynamicCache, PreTrainedModel, ProcessorMixin

from hf_paged import PagedCache

from .compare import (
    Inputs,
    Result,
    Run,
    beams,
    compare,
    decode_path,
    generate,
    greedy,
    groups,
    same_logits,
    text_inputs,
    without_ours,
)
from .media import (
    AUDIO,
    IDS,
    IMAGE,
    OVIS,
    PROMPTS,
    REPEATED,
    SIDE,
    SPECIAL,
    TURN,
    VIDEO,
    assembled,
    inputs,
    tokenizer,
)
from .models import is_tested
from .zoo import build, tiny_config

SECTION = "Vision and audio models"
ANSWER = 5  # tokens of the first answer in a conversation
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
QWEN2 = {**LLAMA, "model_type": "qwen2"}
QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": IDS["<boi>"],
    "vision_end_token_id": IDS["<eoi>"],
}  # fmt: skip
QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8}
WHISPER = {
    "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "max_source_positions": 20,
}  # fmt: skip


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def clip() -> Any:
    return hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square(16))


def qwen(kind: str) -> ProcessorMixin:
    """2 x 2 tokens a picture, of 2 x 2 patches each."""
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    part = hf.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size)
    return assembled(getattr(hf, kind), image_processor=part)


def llava(**settings: Any) -> ProcessorMixin:
    return assembled(hf.LlavaProcessor, image_processor=clip(), patch_size=8, **settings)


def tiles() -> Any:
    """A picture in one tile."""
    return hf.GotOcr2ImageProcessorPil(size=square(SIDE), max_patches=1)


def whisper() -> Any:
    """Up to 1 second of sound, in 40 frames."""
    return hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400)


@dataclass
class Case:
    """A model class, what makes its processor, and what its config needs besides the rule."""

    kind: str
    processor: Callable[[], ProcessorMixin]
    config: dict[str, Any]
    placeholder: str = "<image>"  # what a chat template has for an image or a sound
    attention: str | None = "hf_paged"  # None where it looks that up in a table of its own
    embeds_all: bool = False  # whether generate embeds the whole conversation in each turn


CASES: dict[str, Case] = {
    "llava": Case(
        "LlavaForConditionalGeneration",
        lambda: llava(vision_feature_select_strategy="default", num_additional_image_tokens=1),
        {"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_id": IMAGE,
         "vision_feature_layer": -1},
    ),
    "vipllava": Case(
        "VipLlavaForConditionalGeneration",
        lambda: llava(vision_feature_select_strategy="default", num_additional_image_tokens=1),
        {"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_id": IMAGE,
         "vision_feature_layers": [-1, -2]},
    ),
    "llava_next": Case(
        "LlavaNextForConditionalGeneration",
        lambda: assembled(
            hf.LlavaNextProcessor,
            image_processor=hf.LlavaNextImageProcessorPil(
                size={"shortest_edge": 16}, crop_size=square(16), image_grid_pinpoints=[[32, 32]]
            ),
            patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        ),
        {"text_config": LLAMA, "vision_config": CLIP_VISION, "image_token_id": IMAGE,
         "vision_feature_layer": -1, "image_grid_pinpoints": [[32, 32]]},
    ),
    "llava_onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        lambda: assembled(
            hf.LlavaOnevisionProcessor,
            image_processor=hf.LlavaOnevisionImageProcessorPil(
                size=square(16), image_grid_pinpoints=[[32, 32]]
            ),
            num_image_tokens=4, vision_feature_select_strategy="full",
        ),
        {"text_config": QWEN2, "vision_config": SIGLIP, "image_token_id": IMAGE,
         "video_token_id": VIDEO, "image_grid_pinpoints": [[32, 32]]},
    ),
    "qwen2_vl": Case(
        "Qwen2VLForConditionalGeneration",
        lambda: qwen("Qwen2VLProcessor"),
        {**QWEN_IDS, "vision_config": QWEN_VISION,
         "text_config": {"rope_parameters": ROPE}},
        placeholder="<boi><image><eoi>",
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        lambda: qwen("Qwen2_5_VLProcessor"),
        {**QWEN_IDS, "text_config": {"rope_parameters": ROPE},
         "vision_config": {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64,
                           "window_size": 32, "fullatt_block_indexes": [1]}},
        placeholder="<boi><image><eoi>",
    ),
    "qwen3_vl": Case(
        "Qwen3VLForConditionalGeneration",
        lambda: qwen("Qwen3VLProcessor"),
        {**QWEN_IDS, "text_config": {"rope_parameters": ROPE},
         "vision_config": {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64,
                           "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
        placeholder="<boi><image><eoi>",
    ),
    "qwen3_5": Case(
        "Qwen3_5ForConditionalGeneration",
        lambda: qwen("Qwen3VLProcessor"),
        {**QWEN_IDS,
         "text_config": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
         "vision_config": {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64,
                           "num_position_embeddings": 16}},
        placeholder="<boi><image><eoi>",
    ),
    "qwen2_5_omni_thinker": Case(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        lambda: assembled(hf.Qwen2_5OmniProcessor, feature_extractor=whisper()),
        {**QWEN_IDS, "audio_token_id": AUDIO,
         "text_config": {"rope_parameters": ROPE},
         "audio_config": {**WHISPER, "output_dim": 64, "n_window": 20},
         "audio_start_token_id": IDS["<boa>"], "audio_end_token_id": IDS["<eoa>"],
         "vision_config": {**QWEN_VISION, "hidden_size": 32, "out_hidden_size": 64,
                           "window_size": 32, "fullatt_block_indexes": [1]}},
        placeholder="<boa><audio><eoa>",
    ),
    "glm4v": Case(
        "Glm4vForConditionalGeneration",
        lambda: assembled(
            hf.Glm4vProcessor,
            image_processor=hf.Glm4vImageProcessorPil(
                patch_size=8, merge_size=2,
                size={"shortest_edge": 2 * SIDE**2, "longest_edge": 2 * SIDE**2},
            ),
        ),
        {"image_token_id": IMAGE, "video_token_id": VIDEO,
         "image_start_token_id": IDS["<boi>"], "image_end_token_id": IDS["<eoi>"],
         "text_config": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
         "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
                           "image_size": SIDE, "patch_size": 8, "out_hidden_size": 64}},
        placeholder="<boi><image><eoi>",
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        lambda: assembled(
            hf.Gemma3Processor,
            image_processor=hf.Gemma3ImageProcessorPil(size=square(16)), image_seq_length=4,
        ),
        {"image_token_index": IMAGE, "mm_tokens_per_image": 4, "vision_config": SIGLIP},
        placeholder="<boi>",
    ),
    "gemma4": Case(
        "Gemma4ForConditionalGeneration",
        lambda: assembled(
            hf.Gemma4Processor,
            image_processor=hf.Gemma4ImageProcessorPil(
                patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
            ),
        ),
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO,
         "audio_config": None, "text_config": {"use_bidirectional_attention": "vision"},
         "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
                           "pooling_kernel_size": 2, "patch_size": 4,
                           "position_embedding_size": 100}},
    ),
    "paligemma": Case(
        "PaliGemmaForConditionalGeneration",
        lambda: assembled(
            hf.PaliGemmaProcessor,
            image_processor=hf.SiglipImageProcessorPil(size=square(16), image_seq_length=4),
        ),
        {"image_token_index": IMAGE, "vision_config": {**SIGLIP, "projection_dim": 64},
         "text_config": {**LLAMA, "model_type": "gemma"}, "projection_dim": 64},
    ),
    "idefics2": Case(
        "Idefics2ForConditionalGeneration",
        lambda: assembled(
            hf.Idefics2Processor,
            image_processor=hf.Idefics2ImageProcessorPil(
                size={"shortest_edge": 16, "longest_edge": 16}
            ),
            image_seq_len=4,
        ),
        {"image_token_id": IMAGE, "vision_config": {**CLIP, "hidden_size": 64},
         "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
         "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1,
                              "resampler_n_heads": 2, "resampler_head_dim": 16,
                              "num_key_value_heads": 1, "hidden_size": 64}},
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        lambda: assembled(
            hf.Idefics3Processor,
            image_processor=hf.Idefics3ImageProcessorPil(
                size={"longest_edge": 16}, max_image_size={"longest_edge": 16},
                do_image_splitting=False,
            ),
            image_seq_len=4,
        ),
        {"image_token_id": IMAGE, "scale_factor": 1, "text_config": LLAMA,
         "vision_config": {**CLIP, "hidden_size": 64}},
    ),
    "mllama": Case(
        "MllamaForConditionalGeneration",
        lambda: assembled(
            hf.MllamaProcessor,
            image_processor=hf.MllamaImageProcessorPil(size=square(16), max_image_tiles=2),
        ),
        {"image_token_index": IMAGE,
         "vision_config": {**CLIP, "hidden_size": 16, "intermediate_size": 32, "attention_heads": 2,
                           "num_hidden_layers": 2, "num_global_layers": 1, "max_num_tiles": 2,
                           "intermediate_layers_indices": [0, 1], "vision_output_dim": 48,
                           "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
         "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1],
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}},
    ),
    "aya_vision": Case(
        "AyaVisionForConditionalGeneration",
        lambda: assembled(
            hf.AyaVisionProcessor,
            image_processor=tiles(), patch_size=8, img_size=SIDE, downsample_factor=2,
            img_patch_token="<patch>", start_of_img_token="<boi>", end_of_img_token="<eoi>",
            tile_global_token="<global-img>",
        ),
        {"image_token_index": IDS["<patch>"], "vision_config": {**SIGLIP, "image_size": SIDE}},
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        lambda: assembled(hf.InternVLProcessor, image_processor=tiles(), image_seq_length=4),
        {"image_token_id": IMAGE, "text_config": QWEN2,
         "vision_config": {"image_size": [32, 32], "patch_size": [8, 8], "num_hidden_layers": 2,
                           "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}},
    ),
    "ovis2": Case(
        "Ovis2ForConditionalGeneration",
        lambda: assembled(
            hf.Ovis2Processor,
            image_processor=hf.Ovis2ImageProcessorPil(size=square(16)), image_seq_length=4,
        ),
        {"image_token_id": IDS[OVIS[-1]], "visual_indicator_token_ids": [IDS[t] for t in OVIS[:-1]],
         "text_config": QWEN2,
         "vision_config": {**CLIP, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 20,
                           "num_hidden_layers": 2, "num_attention_heads": 4}},
    ),
    "janus": Case(
        "JanusForConditionalGeneration",
        lambda: assembled(
            hf.JanusProcessor,
            image_processor=hf.JanusImageProcessorPil(size=square(16)), num_image_tokens=4,
        ),
        {"image_token_id": IMAGE, "text_config": LLAMA,
         "vision_config": {**CLIP, "hidden_size": 64, "num_hidden_layers": 2, "mlp_ratio": 2.0,
                           "num_attention_heads": 4, "projection_dim": 64, "num_image_tokens": 4},
         "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
                       "latent_channels": 32, "num_embeddings": 16, "projection_dim": 64,
                       "image_token_embed_dim": 64, "num_patches": 2}},
    ),
    "chameleon": Case(
        "ChameleonForConditionalGeneration",
        lambda: assembled(
            hf.ChameleonProcessor,
            image_processor=hf.ChameleonImageProcessorPil(
                size={"shortest_edge": 16}, crop_size=square(16)
            ),
            image_seq_length=4,
        ),
        {"vocabulary_map": {"<image>": IMAGE,
                            **{f"IMGIMG{chr(65 + i)}Z": 80 + i for i in range(8)}},
         "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "resolution": 16,
                       "num_res_blocks": 1, "latent_channels": 32, "embed_dim": 16,
                       "num_embeddings": 8}},
    ),
    "blip-2": Case(
        "Blip2ForConditionalGeneration",
        lambda: assembled(
            hf.Blip2Processor,
            image_processor=hf.BlipImageProcessorPil(size=square(16)), num_query_tokens=4,
            tokenizer=tokenizer(),
        ),
        {"image_token_index": IMAGE, "num_query_tokens": 4,
         "vision_config": {**CLIP, "hidden_size": 64, "intermediate_size": 96,
                           "num_hidden_layers": 2, "num_attention_heads": 4},
         "qformer_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                            "num_attention_heads": 4, "encoder_hidden_size": 64}},
        placeholder="",
        embeds_all=True,
    ),
    "git": Case(
        "GitForCausalLM",
        lambda: assembled(hf.GitProcessor, image_processor=clip()),
        {"vision_config": {**CLIP, "hidden_size": 64}},
        placeholder="",
        attention=None,
    ),
    "qwen2_audio": Case(
        "Qwen2AudioForConditionalGeneration",
        lambda: assembled(hf.Qwen2AudioProcessor, feature_extractor=whisper()),
        {"audio_token_index": AUDIO, "text_config": QWEN2, "audio_config": WHISPER},
        placeholder="<audio>",
    ),
    "audioflamingo3": Case(
        "AudioFlamingo3ForConditionalGeneration",
        lambda: assembled(
            hf.AudioFlamingo3Processor, feature_extractor=whisper(), audio_token="<audio>"
        ),
        {"audio_token_id": AUDIO, "text_config": QWEN2,
         "audio_config": {"num_mel_bins": 8, "hidden_size": 32, "num_hidden_layers": 2,
                          "num_attention_heads": 2, "intermediate_size": 48,
                          "max_source_positions": 16}},
        placeholder="<audio>",
    ),
}  # fmt: skip
# What transformers cannot do with a model on a DynamicCache either; the suite checks that.
NOT_IN_TRANSFORMERS = {
    "mllama": ("prompt lookup", "second image"),  # which its cross-attention has no mask for
    "paligemma": ("second turn of text",),  # its processor wants an image in each
    "qwen3_5": ("prompt lookup",),  # no state of its linear attention is rolled back
}
# Tested on the newest transformers only, and why.
NEEDS_NEWEST = {
    "blip-2": "prompt lookup from embeddings leaves the candidates out",
    **dict.fromkeys(
        ("gemma4", "idefics2", "idefics3", "ovis2", "qwen2_5_omni_thinker"),
        "the processor needs torchvision",
    ),
}
SAMPLE = ("llava", "gemma3", "qwen2_audio")
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow)
    for name in CASES
    if is_tested(name, NEEDS_NEWEST)
]


def tiny(name: str, attention: str | None = None) -> PreTrainedModel:
    make = getattr(hf, CASES[name].kind)._from_config
    model = build(make, tiny_config(name, CASES[name].config), attention)
    for part in model.modules():  # of BLIP-2 it is the language model that generates
        if getattr(part, "generation_config", None) is not None:
            part.generation_config = copy.deepcopy(model.generation_config)
            part.generation_config.suppress_tokens = [*range(len(SPECIAL))]  # no media in answers
    return model


def prompt(name: str, texts: tuple[str, ...], *numbers: int) -> Inputs:
    """These texts as the model's processor gives them, with the pictures or sounds `numbers`."""
    case = CASES[name]
    return inputs(case.processor(), texts, numbers, case.placeholder)


def prompt_lookup(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
    return generate(model, cache, inputs, prompt_lookup_num_tokens=3)


def second_turn(name: str, *numbers: int) -> Run:
    """A conversation whose second turn brings these pictures or sounds, or text alone."""

    def run(model: PreTrainedModel, cache: Cache, inputs: Inputs) -> Any:
        sequences = generate(model, cache, inputs, max_new_tokens=ANSWER).sequences
        turn = prompt(name, TURN, *numbers)
        turn["attention_mask"] = F.pad(turn["attention_mask"], (ANSWER, 0), value=1)
        turn["attention_mask"] = torch.cat([inputs["attention_mask"], turn["attention_mask"]], 1)
        if CASES[name].embeds_all:
            rest, pictures = sequences, [inputs["pixel_values"]]
            pictures += [turn["pixel_values"]] if numbers else []
            turn["pixel_values"] = torch.stack(pictures, dim=1).flatten(0, 1)
        else:  # what the cache lacks: the end of the answer and the turn
            rest = sequences[:, cache.get_seq_length() :]
        turn["input_ids"] = torch.cat([rest, turn["input_ids"]], dim=1)
        for key in turn.keys() & {"token_type_ids", "mm_token_type_ids"}:
            turn[key] = F.pad(turn[key], (rest.shape[1], 0))
        return generate(model, cache, turn, max_new_tokens=5)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_equals_dynamic_cache(name: str, note: Callable[[Result], None]) -> None:
    case, result = CASES[name], Result(SECTION, name)
    models = tiny(name), tiny(name, case.attention)
    if case.attention is None:
        with pytest.raises(KeyError, match="hf_paged"):
            tiny(name, "hf_paged")
        result.remarks.append(without_ours(KeyError))
    config, media = models[0].config, "sound" if "<audio>" in case.placeholder else "image"
    first = prompt(name, PROMPTS, 0, 1)
    runs: dict[str, Run] = {
        "greedy": greedy,
        "beams": beams,
        "prompt lookup": prompt_lookup,
        "second turn of text": second_turn(name),
        f"second {media}": second_turn(name, 2, 3),
    }
    for kind, run in runs.items():
        start = prompt(name, REPEATED, 0) if kind == "prompt lookup" else first
        caches = DynamicCache(config=config), PagedCache(config=config, block_size=4)
        if kind in NOT_IN_TRANSFORMERS.get(name, ()):
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the model trips over
                run(models[0], caches[0], start)
            result.remarks.append(f"no {kind} in transformers")
            continue
        compare(run, models, caches, start)
    cache = PagedCache(config=config, block_size=4)
    result.path = decode_path(models[1], cache, cache, first)
    result.groups = groups(cache)
    note(result)


@pytest.mark.parametrize("name", NAMES)
def test_the_media_matter(name: str) -> None:
    """Other pictures or sounds give other logits: no prompt is just its text, in neither turn."""
    model, first = tiny(name), prompt(name, PROMPTS, 0, 1)
    runs = [lambda cache, *numbers: greedy(model, cache, prompt(name, PROMPTS, *numbers))]
    if not {"second image", "second sound"} & {*NOT_IN_TRANSFORMERS.get(name, ())}:
        runs += [lambda cache, *numbers: second_turn(name, *numbers)(model, cache, first)]
    for run in runs:
        one, other = (
            run(DynamicCache(config=model.config), *numbers).logits[0]
            for numbers in ((0, 1), (2, 3))
        )
        assert (one - other).abs().amax(-1).min() > 1e-2


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava"])
def test_prefill_of_pictures(name: str) -> None:
    """M-RoPE gives a picture positions that the mask does not tell."""
    model, first = tiny(name, "hf_paged"), prompt(name, PROMPTS, 0, 1)
    expected = greedy(model, DynamicCache(config=model.config), first)
    cache = PagedCache(config=model.config, block_size=4).prefill(model, **first)
    text = {key: first[key] for key in ("input_ids", "attention_mask")}
    found = greedy(model, cache, text)
    assert torch.equal(found.sequences, expected.sequences)
    same_logits(found, expected)
    if name != "llava":
        with pytest.raises(ValueError, match="leave out chunk_size"):
            PagedCache(config=model.config).prefill(model, **first, chunk_size=3)


def test_a_vision_tower_that_cannot_be_loaded_with_our_attention() -> None:
    """Its attention is from a table of its own; the decoder alone can be loaded with ours."""
    layers = {"text_config": {"mlp_layer_types": ["dense", "dense"]}}
    make = hf.DeepseekOcr2ForConditionalGeneration._from_config
    config = tiny_config("deepseek_ocr2", layers)
    with pytest.raises(KeyError, match="hf_paged"):
        build(make, config, "hf_paged")
    models = build(make, config), build(make, config, {"text_config": "hf_paged"})
    caches = DynamicCache(config=config), PagedCache(config=config, block_size=4)
    compare(greedy, models, caches, text_inputs())
    assert caches[1].report().paged_calls > 0
