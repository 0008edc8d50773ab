"""Ctrl-C wherever CPython can deliver it inside of hf_paged.

CPython runs signal handlers at the entry of a function, after a call, and at a backward jump. A
profiler sees the first two from within the call, where an exception unwinds as a signal's would; a
tracer sees each new line, which covers the rest. Lines that begin a `with` are left out: they are
traced again at the block's end, in front of the exit, where no signal is ever delivered.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import hf_paged

T = TypeVar("T")
FOLDER = os.path.dirname(hf_paged.__file__)


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


class Points:
    """The points that a call passes in hf_paged; at one of them an action is run.

    Args:
        at: the number of that point, from 0; None only counts.
        action: what is run there.
    """

    def __init__(self, at: int | None = None, action: Callable[[], Any] = interrupt):
        self._at, self._action = at, action
        self.passed = 0

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns."""
        before = sys.gettrace(), sys.getprofile()
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            return call()
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "return", "c_return") and _is_ours(frame):
            self._pass()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not _is_ours(frame):
            return None
        if event == "line" and not _begins_with(frame):
            self._pass()
        return self._trace

    def _pass(self) -> None:
        self.passed += 1
        if self.passed - 1 == self._at:
            self._action()


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(FOLDER)


def _begins_with(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")
