"""Recordings of the toy kernels, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Recording, Scalar, Tensor, text_of

MODULE = "toy_kernels"
FOLDER = Path(__file__).parent


def floats(name: str, *shape: int, **fields: Any) -> Tensor:
    strides = tuple([shape[1], 1] if len(shape) == 2 else [1])
    described = {"least": -3.0, "most": 3.0, "mean": 0.0, "deviation": 1.0, "is_loaded": True, "is_stored": False}
    return Tensor(name, **{"dtype": "float32", "shape": shape, "strides": strides, **described, **fields})


def written(name: str, *shape: int, **fields: Any) -> Tensor:
    return floats(name, *shape, **{"is_loaded": False, "is_stored": True, **fields})


def by_blocks(n: int, blocks: Sequence[int]) -> Grid:
    return Grid(("B",), tuple(((block,), (-(-n // block),)) for block in blocks))


def kernel(attribute: str, blocks: Sequence[int], *launches: Launch, **fields: Any) -> Kernel:
    configs = tuple(Config({"B": block}, has_pre_hook=attribute == "hooked") for block in blocks)
    return Kernel(f"{MODULE}:{attribute}", configs=configs, **{"key": ("n",), **fields}, launches=launches)


def copies(attribute: str, n: int = 256, blocks: Sequence[int] = (64, 128), **fields: Any) -> Kernel:
    """A kernel that writes ``y`` from ``x``."""
    extra = fields.pop("extra", ())
    storage = {"storage": 1}
    arguments = (floats("x", n), written("y", n, **storage), Scalar("n", n), *extra)
    return kernel(attribute, blocks, Launch(arguments, by_blocks(n, [*blocks, 512])), **fields)


def softmax(rows: int = 64, columns: int = 96) -> Kernel:
    arguments = (
        floats("x", rows, columns),
        written("y", rows, columns, storage=1),
        *(Scalar("rows", rows), Scalar("columns", columns), Scalar("stride", columns)),
    )
    grid = Grid(("ROWS",), tuple(((count,), (-(-rows // count),)) for count in (1, 2, 4)))
    return Kernel(
        f"{MODULE}:softmax",
        key=("columns",),
        configs=(Config({"ROWS": 1}), Config({"ROWS": 2})),
        launches=(Launch(arguments, grid, key=(columns, "torch.float32", "torch.float32")),),
    )


def keyed(n: int = 256) -> Kernel:
    blocks, grid = (64, 128), by_blocks(n, (64, 128))
    rest = (Scalar("n", n), Scalar("FLAG", True, True), Scalar("MODE", "sum", True))
    launches = [
        Launch((floats("x", n, dtype=dtype), written("y", n, dtype=dtype, storage=1), *rest), grid)
        for dtype in ("float32", "float16")
    ]
    return kernel("keyed", blocks, *launches, key=("n", "FLAG", "MODE"))


def bare(n: int = 256) -> Kernel:
    arguments = (floats("x", n), written("y", n, storage=1), Scalar("n", n), Scalar("B", 64, True))
    launch = Launch(arguments, by_blocks(n, (64, 128)), options={"num_warps": 2})
    return Kernel(f"{MODULE}:bare", is_autotuned=False, launches=(launch,))


def write(folder: Path, *kernels: Kernel) -> Path:
    path = folder / "run.json"
    path.write_text(text_of(Recording(kernels=kernels)))
    return path
