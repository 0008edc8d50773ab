"""Prompts with images and sounds, which come about as a user's do.

A picture that is drawn or a sound that is synthesised goes through transformers' own processor of
the model, which also puts the placeholders into the text. Only the tokenizer is made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import transformers as hf
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from .compare import Inputs
from .zoo import VOCAB

# Special tokens by the names under which processors ask a tokenizer for them, and the others.
NAMED = {
    "image_token": "<image>",
    "context_image_token": "<image>",
    "audio_token": "<audio>",
    "video_token": "<video>",
    "boi_token": "<boi>",
    "start_image_token": "<boi>",
    "vision_bos_token": "<boi>",
    "eoi_token": "<eoi>",
    "end_image_token": "<eoi>",
    "vision_eos_token": "<eoi>",
    "boa_token": "<boa>",
    "audio_bos_token": "<boa>",
    "eoa_token": "<eoa>",
    "audio_eos_token": "<eoa>",
    "image_boundary_token": "<fake_token_around_image>",
}
OVIS = [f"<IMG_{part}>" for part in ("START", "GRID", "COL", "ROW", "END", "ATOM")]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<sep>", *dict.fromkeys(NAMED.values()), *OVIS]
SPECIAL += ["<end_of_utterance>", "<global-img>", "<patch>"]
PROMPTS = ("what is this a picture or sound of say what it is", "say it again please")
REPEATED = ("what is this what is this what is",)
TURN = ("and what is that one", "or is that this again")
WORDS = dict.fromkeys(" ".join([*PROMPTS, *REPEATED, *TURN]).split())
IDS = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
IMAGE, AUDIO, VIDEO = IDS["<image>"], IDS["<audio>"], IDS["<video>"]
SIDE = 32  # of a picture, in pixels
RATE = 16_000  # of a sound, in samples a second


def tokenizer(**named: str) -> hf.PreTrainedTokenizerFast:
    """Splits at spaces and at special tokens, some of which are `named`, and pads on the left."""
    model = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=model,
        **{f"{name}_token": f"<{name}>" for name in ("pad", "unk", "sep")},
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=named,
        padding_side="left",
    )
    made.add_tokens(SPECIAL, special_tokens=True)
    assert len(made) <= VOCAB
    return made


def picture(number: int) -> Image.Image:
    """A sun over a field, `number` steps on its way."""
    image = Image.new("RGB", (SIDE, SIDE), (90, 160, 250 - 50 * number))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 20, SIDE, SIDE), fill=(40 * number, 120, 40))
    draw.ellipse((6 * number, 4, 6 * number + 12, 16), fill=(250, 220, 40))
    return image


def sound(number: int) -> np.ndarray:
    """A chord that fades in 0.8 s, float32; `number` is how high."""
    time = np.arange(int(0.8 * RATE)) / RATE
    tones = [np.sin(2 * np.pi * 220 * (number + 1) * ratio * time) for ratio in (1, 1.25, 1.5)]
    return (np.exp(-3 * time) * sum(tones) / 3).astype(np.float32)


class _Partial:
    """A processor that may lack a part: those of videos need torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return argument is None or super().check_argument_for_proper_class(name, argument)


def assembled(kind: type[hf.ProcessorMixin], **parts: Any) -> hf.ProcessorMixin:
    """A processor with these parts and our tokenizer, its other parts None."""
    made = type(kind.__name__, (_Partial, kind), {})
    missing = dict.fromkeys(made.get_attributes())
    return made(**{**missing, "tokenizer": tokenizer(**NAMED), **parts})


def inputs(
    processor: hf.ProcessorMixin,
    texts: Sequence[str],
    numbers: Sequence[int] = (),
    placeholder: str = "<image>",
) -> Inputs:
    """What a processor makes of prompts: each behind the picture or sound of its number, if any."""
    media: Inputs = {}
    if numbers:
        texts = [f"{placeholder} {text}".strip() for text in texts]
        if "<audio>" in placeholder:
            media = {"audio": [sound(number) for number in numbers], "sampling_rate": RATE}
        else:
            media = {"images": [[picture(number)] for number in numbers]}
    return dict(processor(text=list(texts), **media, padding=True, return_tensors="pt"))
