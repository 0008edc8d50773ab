"""Mixed work on a full pool for minutes: nothing grows, nothing slows down, nothing is lost.

HF_PAGED_SOAK_MINUTES is how long, 3 if it is not set. `evals/soak.py` is the same with a report.
"""

from __future__ import annotations

import os

import pytest

from evals.soak import soak, thirds

# What allocators keep and give back differs by a few MiB from one time to another. From the first
# third of 3 minutes to the last there are some 2,000 operations: 8 KiB lost in each would show.
MEMORY_NOISE = 16  # MiB
# Of 440,000; safetensors makes a type of ctypes for each size of a tensor that it writes, which is
# one an operation. A leaked cache has hundreds.
OBJECTS_NOISE = 0.02


@pytest.mark.slow
def test_nothing_grows_in_long_use() -> None:
    work, samples = soak(float(os.environ.get("HF_PAGED_SOAK_MINUTES", "3")))
    first, _, last = thirds(samples)
    print(first, last, work.done, work.pool.stats(), sep="\n")
    assert last["resident MiB"] - first["resident MiB"] < MEMORY_NOISE
    assert last["objects"] < (1 + OBJECTS_NOISE) * first["objects"]
    # Of CPU time, which other processes on the same core stretch to some extent; work that grows
    # with all that was done before would show.
    assert last["operations / CPU s"] > first["operations / CPU s"] / 3
    assert first["in use"] > 0.85
    assert work.pool.stats()["evictions"] > 0
    assert work.done["pool full"] > 0
    assert work.end() == 0
