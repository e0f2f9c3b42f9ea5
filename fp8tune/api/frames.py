"""DataFrames from documents: what their columns hold, of what type and unit.

Texts are ``string``, whole numbers ``Int64`` and truths ``boolean``, which know ``<NA>``. Other numbers are
``float64``, where NaN is what was not measured. A unit ends a column's name: ``_us`` microseconds, ``_share`` a part
of one, ``gb_per_s`` 10^9 bytes a second. A size, a config and attributes are ``NAME=VALUE`` texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from fp8tune.output.documents import Document, value
from fp8tune.output.show import ListedPick, Place

if TYPE_CHECKING:
    from pandas import DataFrame

DTYPES = {"int": "Int64", "float": "float64", "bool": "boolean"}
RENAMED = {
    "gpu": "device",
    "noise": "noise_share",
    "next_best": "next_best_share",
    "over_default": "default_speedup",
    "shape": "size",
    "input_layout": "layout",
    "in_dtype": "dtype",
    "scale_mode": "scale",
}
"""Fields of documents and tables -> columns."""


class Final(Place):
    """A config in the confirmation of a size."""

    config: dict[str, int] = value("Launch config.")
    time_us: float = value("Geometric mean over processes.", "us")
    slower_share: float = value("Slowdown against the fastest of the confirmation.", "share")
    processes: int = value("Fresh processes that timed it.")
    fastest_process_us: float = value("Time in its fastest process.", "us")
    slowest_process_us: float = value("Time in its slowest process.", "us")
    coarse_us: float | None = value("Time in the coarse pass.", "us")
    is_pick: bool = value("True for the pick.")
    is_default: bool = value("True for the declared default.")


class Sample(Place):
    """A sample of a timed block."""

    config: dict[str, int] | None = value("Launch config.")
    stage: str = value("screen for the coarse pass, final for the confirmation.")
    round: int = value("Round, counted from 0.")
    process: str = value("Worker process.")
    sample: int = value("Number in the block, from 0.")
    sample_us: float = value("The sample.", "us")


class GpuInfo(Document):
    """A GPU with the software that drove it: results of two are never compared."""

    gpu: str = value("Name of the GPU.")
    arch: str = value("Architecture, such as sm_90.")
    driver: str = value("Version of the driver.")
    runtime: str = value("cuda or rocm, with its version.")
    torch: str = value("Version of torch.")
    triton: str = value("Version of Triton.")
    kernels: int = value("Kernels that were tried on it.")
    sizes: int = value("Problem sizes that were tried on it.")
    copy_gb_per_s: float | None = value("Rate of a copy on the device, read plus written.", "GB/s")


def table(model: type[Document], documents: Iterable[Document]) -> DataFrame:
    """Return documents as rows."""
    import pandas

    rows = list(documents)
    columns = {
        RENAMED.get(name, name): pandas.Series(
            [_cell(getattr(row, name)) for row in rows], dtype=dtype(str(field.annotation))
        )
        for name, field in model.model_fields.items()
    }
    return pandas.DataFrame(columns)


def dtype(annotation: str) -> str:
    """Return the pandas type of a field."""
    plain = annotation.removeprefix("<class '").removesuffix("'>").removesuffix(" | None")
    return DTYPES.get(plain, "string")


def _cell(cell: object) -> object:
    if isinstance(cell, Enum):
        return str(cell.value)
    if isinstance(cell, list):
        return "; ".join(map(str, cell))
    if isinstance(cell, Mapping):
        return " ".join(f"{name}={item}" for name, item in cell.items() if item != "")
    return cell


TABLES: dict[str, type[Document]] = {"picks": ListedPick, "finals": Final, "samples": Sample, "devices": GpuInfo}
"""Methods of Results -> the document of a row; ``trials`` has the columns of the database."""
