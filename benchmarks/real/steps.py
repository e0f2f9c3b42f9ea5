"""Device of the programs here: the CPU for Triton's interpreter, else the GPU."""

from __future__ import annotations

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
