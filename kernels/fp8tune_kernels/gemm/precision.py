"""stub"""

from __future__ import annotations

import torch

PRECISIONS = ("fp8", "bf16", "auto")


def is_fp8_layer(tokens: int, hidden: int, inner: int, experts: int, top_k: int, device: torch.device) -> bool:
    return True


def is_fp8_product(rows: int, columns: int, outputs: int, experts: int, device: torch.device) -> bool:
    return rows >= 256 * experts
