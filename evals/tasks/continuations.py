"""The data of the tasks in this folder: which of four continuations belongs to a passage.

Made from text at hand, so that no hub is needed. The three wrong ones are continuations of other
passages.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import datasets

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples import small_model

PASSAGE_WORDS, CONTINUATION_WORDS, CHOICES = 28, 12, 4
FEW_SHOT = 16  # items that are examples and never asked


def load(items: int = 300, seed: int = 0, **metadata: Any) -> dict[str, datasets.Dataset]:
    """`items` questions ("test"), and those that few-shot examples are taken from ("train")."""
    numbers = random.Random(seed)
    pieces = _pieces()
    numbers.shuffle(pieces)
    documents = [_document(pieces, at, numbers) for at in range(FEW_SHOT + items)]
    return {
        "train": datasets.Dataset.from_list(documents[:FEW_SHOT]),
        "test": datasets.Dataset.from_list(documents[FEW_SHOT:]),
    }


def _pieces() -> list[tuple[str, str]]:
    """(passage, continuation) from each paragraph of prose, more than one from a long one."""
    size, pieces = PASSAGE_WORDS + CONTINUATION_WORDS, []
    for paragraph in re.split(r"\n\s*\n", small_model.sample_text()):
        words = paragraph.split()
        if words and words[0].isalpha():
            for at in range(0, len(words) - size + 1, size):
                passage, rest = (
                    words[at : at + PASSAGE_WORDS],
                    words[at + PASSAGE_WORDS : at + size],
                )
                pieces.append((" ".join(passage), " ".join(rest)))
    return pieces


def _document(pieces: list[tuple[str, str]], at: int, numbers: random.Random) -> dict[str, Any]:
    passage, continuation = pieces[at]
    others = [other for _, other in pieces if other != continuation]
    choices = [continuation, *numbers.sample(others, CHOICES - 1)]
    numbers.shuffle(choices)
    return {"passage": passage, "choices": choices, "label": choices.index(continuation)}
