"""What ran: kernels, their launches and their arguments, as one JSON file that people read. No torch, no Triton.

``fp8tune record`` writes it, ``sweep --recording`` makes inputs from it, ``export --for`` finds the keys in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fp8tune.errors import UsageError, one_line

R = TypeVar("R")

FORMAT = 2
"""Version of the file: a reader refuses a newer one. Since 2 launches say which of their arguments hold addresses."""

Value = Any
"""A scalar as JSON holds it: an int, float, bool, text or None as it is; ``{"dtype": "torch.float8_e4m3fn"}``,
``{"dtype": "tl.float32"}``, ``{"float": "nan"}`` (or inf, -inf), ``{"tuple": [...]}``,
``{"function": "module:name"}``."""


@dataclass(frozen=True)
class Tensor:
    """A tensor argument. Its values are kept only where an integer tensor is small."""

    name: str
    dtype: str
    """``bfloat16``, without ``torch.``"""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    alignment: int = 16
    """The largest power of two, at most 16, that divides the address in bytes."""
    storage: int = 0
    """Arguments of a launch with the same number share memory; see ``offset``."""
    offset: int = 0
    """Elements from the first that any argument in the same storage has."""
    is_loaded: bool | None = None
    """Whether the compiled code reads it (an atomic does); None: not known."""
    is_stored: bool | None = None
    """Whether the compiled code writes it (an atomic does); None: not known."""
    values: tuple[int, ...] | None = None
    """All elements in row-major order, of an integer tensor of at most 64 KiB."""
    least: float | None = None
    most: float | None = None
    """Of the finite elements. None: nothing was read, for example during the capture of a CUDA graph."""
    mean: float | None = None
    deviation: float | None = None
    zeros: float | None = None
    """Share of zeros."""
    not_finite: float | None = None
    """Share of NaN and infinity."""
    constant: Value = None
    """What all elements of a floating-point tensor are, infinities and NaN too; None where they differ."""
    is_sorted: bool = False
    """Whether an integer tensor never decreases, as group ends do."""
    descriptor: tuple[int, ...] | None = None
    """The block shape, where the argument is a TensorDescriptor over this tensor."""


@dataclass(frozen=True)
class Scalar:
    """Any other argument, by value."""

    name: str
    value: Value
    is_constexpr: bool = False


Argument = Tensor | Scalar


@dataclass(frozen=True)
class Grid:
    """Programs of a launch as a function of the config: the caller's function, called with each config."""

    axes: tuple[str, ...]
    """The config's names that the grid depends on; none where it is constant."""
    table: tuple[tuple[tuple[Value, ...], tuple[int, ...]], ...]
    """(values of ``axes``, programs in x, y, z): the declared configs and powers of two around them."""

    def of(self, config: Mapping[str, Value]) -> tuple[int, ...] | None:
        """The programs of a config; None for one that was not asked."""
        wanted = tuple(config.get(axis) for axis in self.axes)
        return next((programs for values, programs in self.table if values == wanted), None)


CONFIG_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""What ``triton.Config`` takes beside the kernel's own arguments."""


@dataclass(frozen=True)
class Config:
    """A declared ``triton.Config``."""

    kwargs: Mapping[str, Value]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    has_pre_hook: bool = False

    @property
    def options(self) -> dict[str, int]:
        """Of :data:`CONFIG_OPTIONS` warps and stages, the others where they are set."""
        optional = {"num_ctas": None if self.num_ctas == 1 else self.num_ctas, "maxnreg": self.maxnreg}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **given}


@dataclass(frozen=True)
class Launch:
    """Launches that differ in nothing but the values of tensors."""

    arguments: tuple[Argument, ...]
    """In the order of the kernel's parameters, without those that the config sets."""
    grid: Grid
    key: tuple[Value, ...] = ()
    """What the autotuner looks its config up by: the values of its key arguments, then the dtype of each tensor."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Keyword arguments of the launch that are no parameters, such as ``num_warps`` of a bare ``@triton.jit``."""
    count: int = 1
    """An estimate from the 4,096th launch of a kernel on: see :data:`fp8tune.record.patches.CALM`."""
    gpu_us: float | None = None
    """Of one launch, the median of a sample; None where nothing was timed."""
    config: Config | None = None
    """What run-time tuning picked (None: not known)."""
    configs: tuple[Config, ...] | None = None
    """The autotuner's list at this launch, where the program had set another one (None: that of the kernel)."""
    in_graph: bool = False
    """Whether it was only seen while a CUDA graph was captured: replays are not counted."""
    addresses: tuple[str, ...] | None = None
    """The arguments whose integers the compiled code uses as pointers (None: not known): they are of a process that has
    ended, so the launch cannot be repeated."""

    @property
    def id(self) -> str:
        """12 hex digits of everything but values, statistics, counts and times: the same on every rank."""
        kept = ("name", "dtype", "shape", "strides", "alignment", "storage", "offset", "descriptor")
        arguments = [
            [each.name, each.value, each.is_constexpr]
            if isinstance(each, Scalar)
            else [getattr(each, name) for name in kept]
            for each in self.arguments
        ]
        text = json.dumps([arguments, self.options], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran."""

    name: str
    """``module:attribute``, by which it can be imported; a kernel that cannot be has its qualified name."""
    refusal: str = ""
    """Why it cannot be swept: defined in ``__main__``, a closure, launched by torch.compile, and so on."""
    file: str = ""
    """Where it is defined."""
    source_hash: str = ""
    """16 hex digits; see :func:`fp8tune.revisions.source.source_hash`."""
    is_autotuned: bool = True
    """False for a bare ``@triton.jit`` function."""
    parameters: tuple[str, ...] = ()
    """The names of the kernel's parameters."""
    key: tuple[str, ...] = ()
    """The autotuner's key arguments."""
    configs: tuple[Config, ...] = ()
    """As declared, in their order; then those that a launch had beside them."""
    pruner_configs: tuple[Config, ...] = ()
    """What ``early_config_prune`` returns for the launches, where it returns configs that are not declared. Found when
    a recording is swept; empty in its file."""
    tuning_s: float = 0.0
    """Seconds that run-time tuning took, over all keys of all processes."""
    launches: tuple[Launch, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Why launches were not recorded -> how many: an argument of an unknown type, too many distinct ones."""


@dataclass(frozen=True)
class Recording:
    """One run."""

    command: str = ""
    device: str = ""
    """Its name, such as ``NVIDIA H200``."""
    arch: str = ""
    torch: str = ""
    triton: str = ""
    processes: int = 1
    kernels: tuple[Kernel, ...] = ()


def as_json(record: Any) -> Any:
    """A record of this module as plain JSON values; fields at their default are left out."""
    if dataclasses.is_dataclass(record):
        default = {one.name: one for one in dataclasses.fields(record)}
        kind = {"kind": "tensor"} if isinstance(record, Tensor) else {}
        given = {name: getattr(record, name) for name in default}
        return kind | {name: as_json(value) for name, value in given.items() if _is_needed(value, default[name])}
    if isinstance(record, Mapping):
        return {name: as_json(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [as_json(value) for value in record]
    return record


def _is_needed(value: Any, declared: dataclasses.Field[Any]) -> bool:
    if declared.default_factory is not dataclasses.MISSING:
        return bool(value)
    # True == 1: a flag and a count are told apart by type
    return type(value) is not type(declared.default) or value != declared.default


def read(path: Path) -> Recording:
    """The recording in a file. Raises UsageError for a file that is none, or that a newer fp8tune wrote."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        raise UsageError(f"cannot read the recording {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is not JSON: {one_line(error)}: make it with fp8tune record") from None
    version = document.pop("fp8tune_recording", None) if isinstance(document, dict) else None
    if type(version) is not int:
        raise UsageError(f"{str(path)!r} is no recording: make it with fp8tune record -o {path} -- python PROGRAM")
    if version > FORMAT:
        raise UsageError(f"{str(path)!r} was recorded by a newer fp8tune: install that one")
    try:
        return from_json(document, Recording)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError(f"{str(path)!r} is damaged: {one_line(error)}: record it again") from None


def _finite(text: str) -> float:
    """A number of the file. Raises ValueError for NaN and infinity, which JSON does not have."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def text_of(recording: Recording, is_compact: bool = False) -> str:
    """The text of a recording's file; ``is_compact``: on one line, which is far quicker."""
    document = {"fp8tune_recording": FORMAT, **as_json(recording)}
    return (json.dumps(document, allow_nan=False) if is_compact else _indented(document)) + "\n"


def _indented(value: Any, margin: str = "") -> str:
    """JSON whose lists of numbers and short objects stay on one line."""
    short = json.dumps(value, allow_nan=False)
    if len(margin) + len(short) <= 100 or not isinstance(value, dict | list):
        return short
    inner = margin + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {_indented(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if not any(isinstance(each, dict | list) for each in value):
        return short
    return "[\n" + ",\n".join(inner + _indented(each, inner) for each in value) + f"\n{margin}]"


def from_json(document: Any, record: type[R]) -> R:
    """The record that :func:`as_json` made the document of. Raises TypeError or ValueError for any other document."""
    return cast(R, _typed(document, record))


def _typed(document: Any, hint: Any) -> Any:
    """A JSON value as a field's annotation has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return _frozen(document)
    if hint == Argument:
        return _typed(
            {name: value for name, value in document.items() if name != "kind"},
            Tensor if document.get("kind") == "tensor" else Scalar,
        )
    if origin in (UnionType, Union):
        return None if document is None else _typed(document, next(one for one in inner if one is not type(None)))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(document, dict):
            raise ValueError(f"{type(document).__name__} instead of a {hint.__name__}")
        hints = get_type_hints(hint)
        if strange := sorted(set(document) - set(hints)):
            raise ValueError(f"{hint.__name__} has no {strange[0]!r}")
        return cast(Any, hint)(**{name: _typed(value, hints[name]) for name, value in document.items()})
    if origin is tuple:
        if not isinstance(document, list):
            raise ValueError(f"{type(document).__name__} instead of a list")
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_typed(value, inner[0]) for value in document)
        return tuple(_typed(value, one) for value, one in zip(document, inner, strict=True))
    if origin is Mapping:
        if not isinstance(document, dict):
            raise ValueError(f"{type(document).__name__} instead of an object")
        return {name: _typed(value, Any) for name, value in document.items()}
    if hint is float and type(document) is int:
        return float(document)
    if hint is int and type(document) is int and not -(2**63) <= document < 2**63:
        raise ValueError(f"{document!r:.40} is no size or stride")
    if type(document) is not hint:
        raise ValueError(f"{document!r:.40} instead of a value of type {getattr(hint, '__name__', hint)}")
    return document


def _frozen(value: Any) -> Any:
    """Lists as tuples, so that values can be compared with what was recorded."""
    if isinstance(value, list):
        return tuple(_frozen(each) for each in value)
    return {name: _frozen(each) for name, each in value.items()} if isinstance(value, dict) else value


def merged(recordings: Sequence[Recording]) -> Recording:
    """One recording of several processes: launches that differ in nothing but values become one, with all counts."""
    kernels: dict[str, list[Kernel]] = {}
    for recording in recordings:
        for kernel in recording.kernels:
            kernels.setdefault(kernel.name, []).append(kernel)
    return replace(
        recordings[0],
        processes=sum(recording.processes for recording in recordings),
        kernels=tuple(map(_one_kernel, kernels.values())),
    )


def _one_kernel(kernels: Sequence[Kernel]) -> Kernel:
    launches: dict[str, Launch] = {}
    for launch in (launch for kernel in kernels for launch in kernel.launches):
        held = launches.get(launch.id)
        launches[launch.id] = launch if held is None else _one_launch(held, launch)
    refusals = [kernel.refusal for kernel in kernels]  # one that could be recorded in any process can be swept
    skipped: dict[str, int] = {}
    for reason, count in (one for kernel in kernels for one in kernel.skipped.items()):
        skipped[reason] = skipped.get(reason, 0) + count
    first = next((kernel for kernel in kernels if kernel.configs), kernels[0])
    configs = list(first.configs)  # one may hold what cannot be hashed
    for config in (config for kernel in kernels for config in kernel.configs):
        configs += [config] if config not in configs else []
    return replace(
        first,
        configs=tuple(configs),
        refusal="" if "" in refusals and launches else next(filter(None, refusals), ""),
        tuning_s=sum(kernel.tuning_s for kernel in kernels),
        launches=tuple(launches.values()),
        skipped=skipped,
    )


def _one_launch(held: Launch, other: Launch) -> Launch:
    """Of equal launches the first that has values, with both counts."""
    first, second = (other, held) if held.in_graph and not other.in_graph else (held, other)
    gpu_us = [launch.gpu_us for launch in (first, second) if launch.gpu_us is not None]
    return replace(
        first,
        count=held.count + other.count,
        gpu_us=sum(gpu_us) / len(gpu_us) if gpu_us else None,
        config=first.config or second.config,
    )
