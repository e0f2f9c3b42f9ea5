"""Pin an autotuned kernel to a table: it launches what the table says, on every rank, and is never timed.

    TRITON_INTERPRET=1 python docs/examples/pin_autotuned.py     # without a GPU
    FP8TUNE_PIN=tune python docs/examples/pin_autotuned.py       # keys that the table lacks are tuned by Triton
    FP8TUNE_PIN=off python docs/examples/pin_autotuned.py        # as if it were not pinned

A table is a file that ``fp8tune export --for python`` wrote, or a mapping as here: keys as Triton's autotuner makes
them, the values of its key arguments and then the dtype of each tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8tune_kernels import pin

TABLE = {
    (4096, "torch.float32", "torch.float32"): {"kwargs": {"BLOCK": 1024}, "num_warps": 4},
    (65536, "torch.float32", "torch.float32"): {"kwargs": {"BLOCK": 2048}, "num_warps": 8},
}


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024, 2048) for warps in (4, 8)]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    """``out[i] = 2 * x[i]`` for ``n`` elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def main() -> list[int]:
    """The BLOCK of each size's launch."""
    pin(TABLE, double)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = []
    for n in (4096, 5000, 100_000):  # the last two take the config of the nearest size
        x = torch.randn(n, device=device)
        out = torch.empty_like(x)
        double[lambda config: (triton.cdiv(config["n"], config["BLOCK"]),)](x, out, n)
        torch.testing.assert_close(out, 2 * x)
        blocks.append(double.best_config.kwargs["BLOCK"])
        print(f"n={n}: {double.best_config}")
    return blocks


if __name__ == "__main__":
    main()
