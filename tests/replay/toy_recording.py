"""Recordings of a few foreign kernels, written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8tune.replay.recording import Argument, Config, Grid, Kernel, Launch, Recording, Scalar, Tensor, text_of

MODULE = "foreign_kernels"
FOLDER = Path(__file__).parent
BLOCKS = (64, 128)


def floats(name: str, *shape: int, **fields: Any) -> Tensor:
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    described = {"least": -3.0, "most": 3.0, "mean": 0.0, "deviation": 1.0, "is_loaded": True, "is_stored": False}
    return Tensor(name, **{"dtype": "float32", "shape": shape, "strides": strides, **described, **fields})


def written(name: str, *shape: int, **fields: Any) -> Tensor:
    return floats(name, *shape, **{"is_loaded": False, "is_stored": True, "storage": 1, **fields})


def by_blocks(n: int, *blocks: int) -> Grid:
    return Grid(("B",), tuple(((block,), (-(-n // block),)) for block in blocks or (*BLOCKS, 512)))


def kernel(attribute: str, *launches: Launch, **fields: Any) -> Kernel:
    configs = tuple(Config({"B": block}) for block in BLOCKS)
    return Kernel(f"{MODULE}:{attribute}", **{"configs": configs, "key": ("n",), **fields}, launches=launches)


def copies(attribute: str = "copied", n: int = 256, *more: Argument, **fields: Any) -> Kernel:
    """Return a kernel that writes ``y`` from ``x``, launched once."""
    launch = Launch((floats("x", n), written("y", n), Scalar("n", n), *more), by_blocks(n))
    return kernel(attribute, launch, **fields)


def softmax(rows: int = 64, columns: int = 96, stride: int | None = None) -> Kernel:
    sizes = {"rows": rows, "columns": columns, "stride": stride or columns}
    scalars = (Scalar(name, size) for name, size in sizes.items())
    grid = Grid(("ROWS",), tuple(((count,), (-(-rows // count),)) for count in (1, 2, 4)))
    launch = Launch((floats("x", rows, columns), written("y", rows, columns), *scalars), grid)
    configs = (Config({"ROWS": 1}), Config({"ROWS": 2}))
    return kernel("softmax", launch, key=("columns",), configs=configs)


def write(folder: Path, *kernels: Kernel) -> Path:
    path = folder / "run.json"
    path.write_text(text_of(Recording(kernels=kernels)))
    return path
