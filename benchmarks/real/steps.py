"""Steps of a program that is recorded: each is run alone, so that one that fails takes no other with it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


TIMES = 3
"""How often each step is run: the first tunes, the others are like those of a long run."""


def run(steps: Mapping[str, Callable[[], None]]) -> int:
    """Runs each step and says how long it took. Returns the number that failed."""
    import torch

    failed = 0
    for name, step in steps.items():
        start = time.perf_counter()
        try:
            for _ in range(TIMES):
                step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception:
            failed += 1
            traceback.print_exc(limit=3)
            print(f"{name}: failed", file=sys.stderr)
        else:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        torch.cuda.empty_cache()  # the largest step fills a quarter of a GPU
    return failed
