"""Giving memory back to the device, and waiting until that is over: it slows whatever runs beside it."""

from __future__ import annotations

import time

SETTLED_BYTES_PER_S = 200e9
"""After memory went back on an H100 (driver 580), written to or not, a cast took 12 to 20 % longer for 2.5 ms a GiB,
122 ms after 48 GiB; where PyTorch kept it, no longer than before. That is 420 GB/s, as if the driver cleared it
meanwhile; twice that time is waited."""


def give_back() -> None:
    """Give the device what PyTorch holds and nobody uses, and return when it runs as ever."""
    import torch

    if not torch.cuda.is_available():
        return
    held_bytes = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((held_bytes - torch.cuda.memory_reserved()) / SETTLED_BYTES_PER_S)
