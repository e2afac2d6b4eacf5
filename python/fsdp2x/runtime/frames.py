"""Whether a module's call is still on the stack of this thread: tells recursion from a forward that was interrupted."""

from __future__ import annotations

import re
import sys

from torch import nn

# Code that calls a sharded module between its hooks: nn.Module's, also as Dynamo cuts it, and ours for other methods.
_CALLERS = re.compile(r"(?<!_wrapped)_call_impl|call_sharded_method")


def is_running(module: nn.Module) -> bool:
    """Whether ``module`` was called before the call that is being made, and has neither returned nor raised.

    From its pre-forward hook, on the thread that calls it.
    """
    num_calls = 0
    frame = sys._getframe(1)
    while frame is not None:
        if _CALLERS.search(frame.f_code.co_name) and frame.f_locals.get("self") is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls > 1


def depth_of(module: nn.Module) -> int:
    """How many calls of ``module`` are on the stack of this thread."""
    depth = 0
    frame = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return depth
