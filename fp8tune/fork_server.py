"""Python's fork server, with torch and Triton imported and no GPU context: children fork from it in milliseconds."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver
from typing import Any

from fp8tune.stopping import blocked_signals

PRELOAD = [
    "torch",
    "triton",
    "triton.language",
    "triton.testing",
    "torch.fx.experimental.symbolic_shapes",  # a second, where a tensor is made on "meta"
    "fp8tune.measure.trial",
    "fp8tune.measure.compiling",
    "fp8tune.measure.forked",
]
"""Imported once, in the server. None of them touches a GPU at import."""


def start_server() -> None:
    """Start the server now, beside whatever this process does next: its imports take seconds."""
    # Workers are killed, and semaphores of what they import (tqdm, data loaders) are left to Python's resource tracker.
    # It removes them, and need not warn about it.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    with blocked_signals():
        forkserver.ensure_running()


def is_running() -> bool:
    """Return True if this process has started the server."""
    server: Any = getattr(forkserver, "_forkserver", None)  # multiprocessing has no public question for it
    return getattr(server, "_forkserver_pid", None) is not None
