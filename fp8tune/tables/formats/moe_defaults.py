"""Configs that vLLM 0.33.0 and SGLang 0.5.23 launch a fused-MoE kernel with if no file is tuned for it."""

from __future__ import annotations

from collections.abc import Callable

from fp8tune_kernels.arches import ARCHES, KIB

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Numbers of tokens that the tuners of both programs try."""

Default = Callable[[int, int, str, tuple[int, int] | None, str], dict[str, int] | None]
"""Takes tokens, experts, dtype, block shape and arch; returns None where the default depends on more."""

_FEW_SHARED_BYTES = 128 * KIB  # below that of sm_80, sm_90 and sm_100, above that of sm_89 and sm_120


def vllm_default(
    tokens: int, experts: int, dtype: str, block: tuple[int, int] | None, arch: str
) -> dict[str, int] | None:
    """Return vLLM's default config."""
    if dtype in ("int8_w8a16", "int4_w4a16"):  # depends on the top-k, too
        return None
    is_amd = arch.startswith("gfx")
    if dtype == "fp8_w8a8" and block is not None:
        is_small = tokens <= 8 and block[0] % 64 == 0 and not is_amd
        tile = (16 if tokens <= 64 else 64, 64 if is_small else block[0], block[1])
        stages = 4 if is_small and tokens <= 4 else 3
        return _config(tile, 1 if tokens <= 16 else 32, 4, 2 if is_amd else stages) | {"SPLIT_K": 1}
    rows = next((rows for most, rows in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    tile = (rows, 64 if tokens <= 64 else 128, 128 if dtype == "fp8_w8a8" or tokens <= 64 else 64)
    group = 16 if tokens // max(experts, 1) > 128 else 1
    stages = 2 if is_amd else 4 if tokens <= 32 else 3
    return _config(tile, group, 4 if tokens <= 128 else 8, stages) | {"SPLIT_K": 1}


def sglang_default(
    tokens: int, experts: int, dtype: str, block: tuple[int, int] | None, arch: str
) -> dict[str, int] | None:
    """Return SGLang's default config. Without warps and stages in it, the compiler's own count."""
    is_amd, is_small = arch.startswith("gfx"), tokens <= experts
    if dtype != "fp8_w8a8":
        return _config((16, 32, 64), 1) if is_small else _config((64, 64, 32), 8)
    if block is not None:
        return _config((64, *block), 32, 4, 2 if is_amd else 3)
    if arch not in ARCHES:
        return None
    if not is_amd and ARCHES[arch].shared_bytes_per_block < _FEW_SHARED_BYTES:
        return _config((32, 64, 256), 1, 4, 4) if is_small else _config((64, 128, 256), 64, 4, 2)
    stages = 2 if is_amd else 4
    return _config((64, 128, 128), 1, 4, stages) if is_small else _config((128, 256, 128), 32, 8, stages)


def _config(tile: tuple[int, int, int], group: int, num_warps: int = 0, num_stages: int = 0) -> dict[str, int]:
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
    return {name: value for name, value in zip(names, (*tile, group, num_warps, num_stages), strict=True) if value}
