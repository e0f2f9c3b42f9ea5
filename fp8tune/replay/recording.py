"""A recorded run: kernels, their launches and the arguments, as one JSON file. Needs neither torch nor Triton.

:class:`Launch` is the one description of a launch: ``record`` makes it, a sweep repeats it, and the database stores it
beside the results, from where exports and pinned programs take the key.
"""

from __future__ import annotations

import array
import base64
import dataclasses
import functools
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fp8tune.errors import UsageError, one_line

R = TypeVar("R")
M = TypeVar("M", "Launch", "Kernel")

FORMAT = 3  # version of the file. Older recordings are made again, newer ones need a newer fp8tune.

Value = Any  # a plain value as JSON holds it; `fp8tune.replay.values` has the table of kinds

CONFIG_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Arguments of ``triton.Config`` beside the kernel's own."""


@dataclass(frozen=True)
class Tensor:
    """An argument in memory: a tensor, or a TensorDescriptor over one."""

    name: str  # the parameter; `parts[0]` for a tensor inside a tuple
    dtype: str  # `bfloat16`, without `torch.`
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 16  # the largest power of two, at most 16, that divides the address
    storage: int = 0  # arguments of a launch with the same number share memory; see `offset`
    offset: int = 0  # elements from the first that any argument in the same storage has
    is_loaded: bool | None = None  # True if the compiled code reads it; None if unknown
    is_stored: bool | None = None  # True if the compiled code writes it; None if unknown. An atomic reads and writes.
    values: tuple[int, ...] | None = None  # all elements of a small integer tensor, in row-major order
    packed: str = ""  # all elements of a larger integer tensor, see `pack`
    least: float | None = None
    most: float | None = None
    """Extremes of the finite elements; None if nothing was read, as in the capture of a CUDA graph."""
    mean: float | None = None
    deviation: float | None = None
    zeros: float | None = None  # share of zeros
    not_finite: float | None = None  # share of NaN and infinity
    constant: Value = None
    """The value of all elements of a floating-point tensor, infinities and NaN included; None where they differ."""
    is_sorted: bool = False  # True if an integer tensor never decreases, as group ends do
    descriptor: tuple[int, ...] | None = None  # the block shape, where the argument is a TensorDescriptor

    @property
    def integers(self) -> tuple[int, ...] | None:
        """All elements of an integer tensor; None if they were not stored. Raises ValueError for damaged ones."""
        if not self.packed:
            return self.values
        try:
            return tuple(array.array("q", zlib.decompress(base64.b64decode(self.packed))))
        except zlib.error as error:
            raise ValueError(f"packed integers are damaged ({error})") from None

    @property
    def is_integer(self) -> bool:
        """True if elements are integers or flags."""
        return not self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True)
class Scalar:
    """Any other argument, by value."""

    name: str
    value: Value
    is_constexpr: bool = False


Argument = Tensor | Scalar


def pack(integers: bytes) -> str:
    """Compress 64-bit integers to text."""
    return base64.b64encode(zlib.compress(integers, 1)).decode()


@dataclass(frozen=True)
class Grid:
    """Programs of a launch for each config: the caller's function, as a table."""

    axes: tuple[str, ...]  # the config's names that the grid depends on; none where it is constant
    table: tuple[tuple[tuple[Value, ...], tuple[int, ...]], ...]
    """(values of ``axes``, programs in x, y, z): the declared configs, and powers of two around them."""

    def programs(self, config: Mapping[str, Value]) -> tuple[int, ...] | None:
        """Return the programs of a config; None for one that is not in the table."""
        expected_values = tuple(config.get(axis) for axis in self.axes)
        return next((programs for values, programs in self.table if values == expected_values), None)


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
        """Warps and stages, and the other :data:`CONFIG_OPTIONS` where they are set."""
        optional = {"num_ctas": None if self.num_ctas == 1 else self.num_ctas, "maxnreg": self.maxnreg}
        options = {name: value for name, value in optional.items() if value is not None}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **options}

    @property
    def values(self) -> dict[str, Value]:
        """All values by name, as a grid may ask for them."""
        return {**{name: getattr(self, name) for name in CONFIG_OPTIONS}, **self.kwargs}


@dataclass(frozen=True)
class Launch:
    """Launches that differ in nothing but the values of tensors."""

    arguments: tuple[Argument, ...]  # all but those that the config sets, in the order of the kernel's parameters
    grid: Grid
    key: tuple[Value, ...] = ()
    """The key under which an autotuner looks its config up: values of key arguments, then the dtype of each tensor."""
    options: Mapping[str, Value] = field(default_factory=dict)
    """Keyword arguments that are no parameters, such as ``num_warps`` of a bare ``@triton.jit`` function."""
    count: int = 1  # number of launches; an estimate after `fp8tune.replay.watch.kernel.CALM` launches of a kernel
    gpu_us: float | None = None  # median time of one launch; None where nothing was timed
    config: Config | None = None  # the config that run-time tuning picked; None if unknown
    configs: tuple[Config, ...] | None = None  # those that a bare kernel was launched with, the most frequent first
    in_graph: bool = False
    """True if no values were read, because the launch was captured in a CUDA graph or traced by torch.compile."""
    is_traced: bool = False  # True if torch.compile traced it: the program launched a copy of the kernel
    addresses: tuple[str, ...] | None = None
    """Arguments whose integers become pointers in the compiled code (None: unknown). Such a launch cannot be repeated:
    the addresses are those of a process that has ended."""
    shared: tuple[Launch, ...] = ()  # launches that share its config, where a sweep stored it; empty in a recording
    code: str = ""  # key of the compiled code in `Recording.codes`, in the parts that single processes write
    has_own_inputs: bool = False  # True if a sweep made its inputs for each config; False in a recording

    @cached_property
    def id(self) -> str:
        """12 hex digits of everything but values, statistics, counts and times: the same on every rank."""
        # Databases name launches by it, so its text must never change.
        names = {
            Scalar: ("name", "value", "is_constexpr"),
            Tensor: ("name", "dtype", "shape", "strides", "alignment", "storage", "offset", "descriptor"),
        }
        arguments = [[getattr(item, name) for name in names[type(item)]] for item in self.arguments]
        text = json.dumps([arguments, self.options], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def tensors(self) -> list[Tensor]:
        """Arguments in memory."""
        return [item for item in self.arguments if isinstance(item, Tensor)]

    @property
    def scalars(self) -> dict[str, Value]:
        """Arguments that are no memory, by name."""
        return {item.name: item.value for item in self.arguments if isinstance(item, Scalar)}

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Launch:
        """Return the launch with each tensor changed."""
        arguments = (change(item) if isinstance(item, Tensor) else item for item in self.arguments)
        return replace(self, arguments=tuple(arguments))

    def without_values(self) -> Launch:
        """Return the launch without the elements of its tensors."""
        return self.with_tensors(lambda tensor: replace(tensor, values=None, packed=""))

    def merged(self, later: Launch) -> Launch:
        """Add a launch of the same id: the one that has values, with the counts, programs and configs of both.

        Configs stay apart where one table cannot hold the programs of both, as for two fixed grids.
        """
        first, second = (later, self) if self.in_graph and not later.in_graph else (self, later)
        times_us = [launch.gpu_us for launch in (first, second) if launch.gpu_us is not None]
        is_common = first.grid == second.grid or first.grid.axes == second.grid.axes != ()
        is_union = is_common and first.grid != second.grid
        table = distinct(first.grid.table + second.grid.table) if is_union else first.grid.table
        configs = None if self.configs is None or later.configs is None else distinct(self.configs + later.configs)
        return replace(
            first,
            grid=replace(first.grid, table=table),
            configs=configs if is_common else first.configs,
            count=self.count + later.count,
            gpu_us=sum(times_us) / len(times_us) if times_us else None,
            config=first.config or second.config,
            code=first.code or second.code,
        )


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran."""

    name: str  # `module:attribute`, by which it can be imported; a qualified name if it cannot be
    refusal: str = ""  # the reason why it cannot be swept: a closure, defined in `__main__`, and so on
    file: str = ""  # the file that defines it
    source_hash: str = ""  # 16 hex digits; see `fp8tune.revisions.source.source_hash`
    is_autotuned: bool = True  # False for a bare `@triton.jit` function
    parameters: tuple[str, ...] = ()
    key: tuple[str, ...] = ()  # the autotuner's key arguments
    configs: tuple[Config, ...] = ()  # declared configs in their order
    pruner_configs: tuple[Config, ...] = ()
    """Configs that ``early_config_prune`` makes, if it returns others than the declared. Determined when a recording
    is swept; empty in its file."""
    tuning_s: float = 0.0  # seconds that run-time tuning took, over all keys of all processes
    launches: tuple[Launch, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)  # reason why launches were only counted -> their number
    tuned_s: Mapping[str, float] = field(default_factory=dict)
    """Key, as text -> seconds that its run-time tuning took; 0 where Triton's interpreter took the first config."""
    table: str = ""  # the table that the kernel was pinned to
    table_keys: Mapping[str, str] = field(default_factory=dict)  # key -> key of the table whose config it took
    declaration_hash: str = ""  # hash of its code and configs when a sweep read them; empty in a recording

    @cached_property
    def numbered(self) -> dict[str, list[str]]:
        """Name -> the JSON of its values, for names that configs declare with other values than integers."""
        values: dict[str, dict[str, bool]] = {}
        for name, value in (item for config in self.configs for item in config.kwargs.items()):
            values.setdefault(name, {})[json.dumps(value, sort_keys=True)] = type(value) is int
        return {name: list(texts) for name, texts in values.items() if not all(texts.values())}

    @cached_property
    def mixed(self) -> list[str]:
        """Tensors that have not the same dtype in all launches."""
        dtypes: dict[str, set[str]] = {}
        for tensor in (tensor for launch in self.launches for tensor in launch.tensors):
            dtypes.setdefault(tensor.name, set()).add(tensor.dtype)
        return [name for name, several in dtypes.items() if len(several) > 1]

    def merged(self, later: Kernel) -> Kernel:
        """Add what another process recorded."""
        launches = merged_by((*self.launches, *later.launches), lambda launch: launch.id)
        first, second = (self, later) if self.configs else (later, self)
        is_fine = launches and not (self.refusal and later.refusal)  # recorded in any process is enough
        tuned_s = {**self.tuned_s, **later.tuned_s}
        return replace(
            first,
            configs=distinct(first.configs + second.configs),
            refusal="" if is_fine else self.refusal or later.refusal,
            tuning_s=self.tuning_s + later.tuning_s,
            tuned_s={key: self.tuned_s.get(key, 0.0) + later.tuned_s.get(key, 0.0) for key in tuned_s},
            table=first.table or second.table,
            table_keys={**self.table_keys, **later.table_keys},
            launches=launches,
            skipped=dict(Counter(self.skipped) + Counter(later.skipped)),
        )


@dataclass(frozen=True)
class Recording:
    """One run."""

    command: str = ""
    device: str = ""  # its name, such as `NVIDIA H200`
    arch: str = ""
    torch: str = ""
    triton: str = ""
    processes: int = 1
    kernels: tuple[Kernel, ...] = ()
    codes: Mapping[str, Value] = field(default_factory=dict)
    """Key -> (argument names, text) of compiled code, in the parts that single processes write."""
    unpinned: Mapping[str, str] = field(default_factory=dict)
    """Kernel -> the reason why no table gave it its configs; empty if no table was pinned."""


def distinct(items: Iterable[R]) -> tuple[R, ...]:
    """Return configs or rows of a grid in their order, each once; they may hold what cannot be hashed."""
    result: list[R] = []
    for item in items:
        result += [item] if item not in result else []
    return tuple(result)


def merged_by(records: Iterable[M], key: Callable[[M], str]) -> tuple[M, ...]:
    """Return launches or kernels in their order, those with an equal key merged."""
    result: dict[str, M] = {}
    for record in records:
        result[key(record)] = result[key(record)].merged(record) if key(record) in result else record
    return tuple(result.values())


def merged(recordings: Sequence[Recording]) -> Recording:
    """Return one recording of several processes: equal launches become one, with all counts."""
    return replace(
        recordings[0],
        processes=sum(recording.processes for recording in recordings),
        kernels=merged_by((item for part in recordings for item in part.kernels), lambda kernel: kernel.name),
        codes={key: code for recording in recordings for key, code in recording.codes.items()},
        unpinned={kernel: reason for recording in recordings for kernel, reason in recording.unpinned.items()},
    )


def as_json(record: Any) -> Any:
    """Return a record as plain JSON values; fields at their default are left out."""
    if dataclasses.is_dataclass(record):
        document = {"kind": "tensor"} if isinstance(record, Tensor) else {}
        for item in dataclasses.fields(record):
            value, default = getattr(record, item.name), item.default
            is_collection = item.default_factory is not dataclasses.MISSING
            # True == 1: a flag and a count are told apart by their type
            is_default = not value if is_collection else type(value) is type(default) and value == default
            document |= {} if is_default else {item.name: as_json(value)}
        return document
    if isinstance(record, Mapping):
        return {name: as_json(value) for name, value in record.items()}
    return [as_json(value) for value in record] if isinstance(record, list | tuple) else record


def text_of(recording: Recording, is_compact: bool = False) -> str:
    """Return the text of a recording's file; ``is_compact``: on one line, which is far quicker."""
    document = {"fp8tune_recording": FORMAT, **as_json(recording)}
    return (json.dumps(document, allow_nan=False) if is_compact else _indented(document)) + "\n"


def _indented(value: Any, margin: str = "") -> str:
    """Return JSON whose lists of numbers and short objects stay on one line."""
    short = json.dumps(value, allow_nan=False)
    is_flat = isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if len(margin) + len(short) <= 100 or is_flat or not isinstance(value, dict | list):
        return short
    inner = margin + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {_indented(item, inner)}" for name, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    return "[\n" + ",\n".join(inner + _indented(item, inner) for item in value) + f"\n{margin}]"


def read(path: Path) -> Recording:
    """Read a recording. Raises UsageError for any other file."""
    name, command = repr(str(path)), f"fp8tune record -o {path} -- python PROGRAM"
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        raise UsageError(f"cannot read the recording {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON: {one_line(error)}: make it with fp8tune record") from None
    version = document.pop("fp8tune_recording", None) if isinstance(document, dict) else None
    if type(version) is not int:
        raise UsageError(f"{name} is no recording: make it with {command}")
    if version != FORMAT:
        age, fix = ("a newer", "install that one") if version > FORMAT else ("an older", f"record again: {command}")
        raise UsageError(f"{name} was recorded by {age} fp8tune: {fix}")
    try:
        return from_json(document, Recording)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{name} is damaged: {one_line(error)}: record it again") from None


def _finite(text: str) -> float:
    """Return a number of the file. Raises ValueError for NaN and infinity, which JSON does not have."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


_fields_of = functools.cache(get_type_hints)  # it compiles the text of each annotation


def from_json(document: Any, record: type[R]) -> R:
    """Return the record that :func:`as_json` made the document of, or a value of another annotation.

    Raises TypeError or ValueError for any other document.
    """
    hint, origin, inner = cast(Any, record), get_origin(record), get_args(record)
    if hint == Argument:
        hint = Tensor if document.get("kind") == "tensor" else Scalar
        document = {name: value for name, value in document.items() if name != "kind"}
    elif hint is Any:  # lists as tuples, so that values can be compared with what was recorded
        if not isinstance(document, list | dict):
            return cast(R, document)
        origin, inner = (tuple, (Any, ...)) if isinstance(document, list) else (Mapping, (str, Any))
    is_record = dataclasses.is_dataclass(hint)
    expected: Any = list if origin is tuple else dict if is_record or origin is Mapping else object
    if not isinstance(document, expected):
        raise ValueError(f"{type(document).__name__} instead of {'a list' if expected is list else 'an object'}")
    result: Any = document
    if is_record:
        hints = _fields_of(hint)
        if strange := sorted(set(document) - set(hints)):
            raise ValueError(f"{hint.__name__} has no {strange[0]!r}")
        result = hint(**{name: from_json(value, hints[name]) for name, value in document.items()})
    elif origin in (UnionType, Union):
        result = None if document is None else from_json(document, inner[0])
    elif origin is tuple:
        items = inner[:1] * len(document) if inner[-1] is Ellipsis else inner
        result = tuple(from_json(value, item) for value, item in zip(document, items, strict=True))
    elif origin is Mapping:
        result = {name: from_json(value, inner[1]) for name, value in document.items()}
    elif hint is float and type(document) is int:
        result = float(document)
    elif document not in inner if origin is Literal else type(document) is not hint:
        raise ValueError(f"{document!r:.40} instead of {hint if inner else f'a value of type {hint.__name__}'}")
    elif hint is int and not -(2**63) <= document < 2**63:
        raise ValueError(f"{document!r:.40} is no size or stride")
    return cast(R, result)
