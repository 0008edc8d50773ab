"""Mixed work on a full pool for minutes: nothing grows, nothing is lost.

HF_PAGED_SOAK_MINUTES is how long, 3 if it is not set. `evals/soak.py` also judges the speed: tests
assert on no time.
"""

from __future__ import annotations

import os

import pytest

from evals.soak import Sample, lost, slowed, soak, thirds

# Of 440,000; safetensors makes a type of ctypes for each size of a tensor that it writes, which is
# one an operation. A leaked cache has hundreds.
OBJECTS_NOISE = 0.02


@pytest.mark.slow
def test_nothing_grows_in_long_use() -> None:
    work, samples = soak(float(os.environ.get("HF_PAGED_SOAK_MINUTES", "3")))
    first, _, last = thirds(samples)
    print(first, last, work.done, work.pool.stats(), sep="\n")
    assert last["objects"] < (1 + OBJECTS_NOISE) * first["objects"]
    assert work.pool.stats()["evictions"] > 0
    assert work.done["pool full"] > 0
    assert list(lost(first, last, work.end())) == []


USUAL = Sample(
    minutes=1.0,
    cpu_seconds=2.0,
    reference=0.5,
    resident=2**29,
    objects=440_000,
    in_use=0.9,
    not_free=0.97,
)


def judged(**last: float) -> list[str]:
    """What is said of three thirds that are alike but for `last`."""
    first, _, other = thirds([USUAL] * 6 + [USUAL._replace(**last)] * 3)
    return [*lost(first, other, 0), *slowed(first, other)]


def test_a_slower_machine_is_no_slower_work() -> None:
    assert judged() == judged(cpu_seconds=4.0, reference=1.0) == []
    [sentence] = judged(cpu_seconds=2.6)
    assert "77% of the speed" in sentence


def test_what_grew_and_what_is_gone_are_said() -> None:
    [sentence] = judged(resident=2**29 + 17 * 2**20)
    assert "17.0 MiB" in sentence
    [sentence] = judged(not_free=0.93)
    assert "93.0% of the pool" in sentence
    same = thirds([USUAL] * 3)[0]
    assert list(lost(same, same, 2)) == ["2 blocks did not come back."]
