"""Computation that Triton does in each process, done once in the server that forks workers."""

import os

from triton.runtime import cache

if os.environ.get("TRITON_INTERPRET") != "1" and hasattr(cache, "triton_key"):
    cache.triton_key()  # hashes 460 MB of libraries: half a second of the 1.1 that a worker took to its first launch
