"""The declaration of a kernel: the one interface between a kernel file and the tuner.

Imports neither torch nor triton. A spec may live in any repository: fp8tune loads it as ``module:ATTRIBUTE`` or
``path.py:ATTRIBUTE`` and treats it like its own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu")
"""Axes that Triton's compiler takes; the interpreter ignores them."""

LAYOUT_FLAG = "input_layout_transposed"
"""The name in a lookup key that is no size but tells the input layouts apart: 0 or 1."""

DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int8",
)
"""Input dtypes. A lookup key holds a dtype by its place here: new ones go to the end."""

DTYPE_FLAG = "in_dtype"
"""The name in a lookup key that is no size but tells the input dtypes apart: a place in :data:`DTYPES`."""

FLAGS = frozenset({LAYOUT_FLAG, DTYPE_FLAG})
"""The names in lookup keys whose values are no sizes: two keys with different ones are never near each other."""

SCALE_MODES = ("power-of-two", "exact")
"""Scale modes of FP8 with one float32 scale a row or column; see :attr:`Problem.scale_mode`."""

ROUTINGS = ("balanced", "jagged", "zipf", "one-giant", "empty", "ragged")
"""Group layouts a problem with groups can have; ``none`` stands for a kernel without groups."""

INTERPRETED_SIZES = {"M": 157, "K": 101, "N": 67, "E": 2, "G": 3}
"""dim -> its largest size on Triton's interpreter, where a spec names no other."""

_INTERPRETED_OTHERS = (131, 131, 37, 13, 7)
"""The same of dims with other names, where there is one, two and so on: primes, and few elements in all."""


class NamedInts(Mapping[str, int]):
    """An immutable, hashable mapping of names to integers: a shape, a config or a lookup key.

    Keeps the order it was given for printing; equality, hash and :attr:`canonical` ignore that order.
    """

    __slots__ = ("_canonical", "_hash", "_items", "_text")

    def __init__(self, items: Mapping[str, int] | Sequence[tuple[str, int]] = (), /, **named: int) -> None:
        self._items: dict[str, int] = {**dict(items), **named}
        self._hash = hash(frozenset(self._items.items()))
        self._canonical = self._text = ""

    def __getitem__(self, name: str) -> int:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def items(self) -> ItemsView[str, int]:
        """Return names and integers, five times as fast as the items of any mapping."""
        return self._items.items()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, value: object) -> bool:
        if isinstance(value, NamedInts):  # without a copy: rankings compare by the million
            return self._items == value._items
        return isinstance(value, Mapping) and self._items == dict(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (NamedInts, (tuple(self._items.items()),))

    def __str__(self) -> str:
        if not self._text:  # once: a thousand problems share a hundred configs
            self._text = " ".join(f"{name}={value}" for name, value in self._items.items())
        return self._text

    def __repr__(self) -> str:
        return f"NamedInts({self})"

    @property
    def canonical(self) -> str:
        """``name=value`` pairs sorted by name, with a blank between: one text for equal mappings."""
        if not self._canonical:
            self._canonical = " ".join(f"{name}={int(value)}" for name, value in sorted(self._items.items()))
        return self._canonical


@dataclass(frozen=True)
class Problem:
    """One input a kernel is checked and timed on: everything that can change the winner."""

    kernel: str
    """The kernel's name."""
    shape: NamedInts
    """Size by name."""
    routing: str = "none"
    """How rows spread over groups: one of :data:`ROUTINGS`, or ``none`` for a kernel without groups."""
    input_layout: str = "contiguous"
    """``contiguous`` or ``transposed`` (the ``.t()`` view of a contiguous tensor)."""
    in_dtype: str = "bfloat16"
    """Of the inputs: one of :data:`DTYPES`."""
    fp8_dtype: str = "float8_e4m3fn"
    """Of the outputs."""
    scale_mode: str = "power-of-two"
    """``power-of-two`` (the training default) or ``exact``; MXFP8: ``floor`` or ``rceil``."""
    seed: int = 0
    """Seeds both the values and the group layout."""


CONTENTS = ("random", "zeros", "nan", "infinite", "tiny", "huge", "integers")
"""What an :class:`Edge` may put into the floating-point inputs: see :func:`fp8tune.measure.edges.fill`."""


@dataclass(frozen=True)
class Edge:
    """A small input on which every config is checked before it is timed: the sizes that are timed are round."""

    name: str
    """For messages: ``one row``, ``a block and one more``, ``NaN``."""
    problem: Problem
    """The small problem."""
    content: str = "random"
    """One of :data:`CONTENTS`."""
    offset: int = 0
    """Elements by which each input begins past an aligned address."""


_FEWEST_THREADS = 32
"""Of a warp: AMD's have 64, and so half the values each."""


@dataclass(frozen=True)
class Span:
    """A tile that may hold all of what a kernel reduces over: its input is then read once, and twice otherwise."""

    axis: str | None
    """Of the config: how long the tile is; None for a tile that always holds all."""
    size: str
    """Of the lookup key: how long what is reduced over is."""
    values_a_thread: int | None = None
    """Where a tile that holds all is kept in registers: how many of its elements a thread may have."""

    def holds(self, config: Mapping[str, int], key: Mapping[str, int]) -> bool:
        """Return True if the tile of a config holds all of it."""
        return self.axis is None or config[self.axis] >= key[self.size]

    def suits(self, config: Mapping[str, int], measured: Mapping[str, int], key: Mapping[str, int]) -> bool:
        """Return True if a config for one lookup key, empty of a config for all, may be launched for another.

        Not if it would read the input twice only here, nor if only here a thread would have too many values.

        A row of an older kernel without such an axis or size passes.
        """
        if self.size not in key or (self.axis is not None and self.axis not in config):
            return True
        holds, size = self.holds(config, key), key[self.size]
        if holds and self.values_a_thread and size > measured.get(self.size, 0):  # noqa: SIM102 - a line each
            if size > self.values_a_thread * _FEWEST_THREADS * config["num_warps"]:
                return False
        return self.size not in measured or holds or not self.holds(config, measured)


@dataclass(frozen=True)
class DeviceLimits:
    """The hardware limits a config can break. Sizes in bytes."""

    arch: str
    """``sm_90``, ``gfx942``."""
    warp_size: int
    """Threads of a warp, or of a wavefront."""
    shared_bytes_per_block: int
    """The most shared memory of a block."""
    registers_per_block: int
    """Registers of a block, all threads together."""
    multiprocessors: int
    """SMs (NVIDIA) or CUs (AMD)."""
    max_threads_per_block: int = 1024
    """The most threads of a block."""


CHECKS = ("exact", "exact-inputs", "tolerance")
"""What "right" can mean: equal bytes; equal bytes on inputs whose partial sums are exact in any order; within a bound
of a float64 reference."""


@dataclass(frozen=True)
class Tolerance:
    """An element is right if ``|got - expected| <= absolute + relative * |expected| + rms * size``.

    The size is the root mean square of the finite expected elements. NaN is right where NaN is expected.
    """

    relative: float
    """Share of the expected element."""
    absolute: float = 0.0
    """In the outputs' own unit."""
    rms: float = 0.0
    """Share of the root mean square: what a sum whose terms cancel may be off by."""

    def allowed(self, expected: Any, size: Any = None) -> Any:
        """Return the allowed error of each element. ``size``: the root mean square of all, if these are a part."""
        bound = self.absolute + self.relative * expected.abs()
        return bound + self.rms * (root_mean_square(expected) if size is None else size) if self.rms else bound

    def __str__(self) -> str:
        parts = {"relative": self.relative, "absolute": self.absolute, "of the RMS": self.rms}
        return " + ".join(f"{_short(bound)} {name}" for name, bound in parts.items() if bound)


def root_mean_square(tensor: Any) -> Any:
    """Return the root mean square of a tensor's finite elements, as a float64 tensor; 0 for none."""
    finite = tensor.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return finite.square().sum().div(tensor.isfinite().sum().clamp(min=1)).sqrt()


def _short(bound: float) -> str:
    """Return ``1e-03``; in full where that says less."""
    return text if float(text := f"{bound:.0e}") == bound else str(bound)


@dataclass(frozen=True)
class KernelSpec:
    """Everything fp8tune needs to check, time and export a kernel."""

    name: str
    """What commands and tables call the kernel."""
    axes: Mapping[str, tuple[int, ...]]
    """The grid: axis name -> values, in the order that breaks ties."""
    default: NamedInts
    """The config that is always in the sweep, and that is launched where the table has nothing."""
    key: tuple[str, ...]
    """Names the exported table is looked up by: shape dims, ``<dim>_bucket`` (see :func:`bucket`),
    :data:`LAYOUT_FLAG` or :data:`DTYPE_FLAG`; those of :data:`FLAGS` are no sizes. Never the exact M: it changes every
    step."""
    problems: Callable[[Mapping[str, int]], Iterator[NamedInts]]
    """One row of a shape set (dims of any names; in those of fp8tune ``M``, ``K``, ``N``, ``E``) -> the shapes of this
    kernel in it; duplicates are dropped. Where a row may lack a dim, yield what needs none first, and let the KeyError
    go."""
    inputs: Callable[[Problem, str], tuple[Any, ...]]
    """(problem, torch device) -> the positional inputs of ``outputs``, ``launch`` and ``reference``: seeded, random.
    Must work on device ``meta`` (shapes and strides only)."""
    outputs: Callable[..., tuple[Any, ...]]
    """(*inputs) -> freshly allocated, uninitialised output tensors. Must work on ``meta`` inputs."""
    launch: Callable[[Mapping[str, int], tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...] | None]
    """(config, inputs, outputs): launches the kernel(s) with exactly this config; writes every element of outputs, or
    returns a tuple of outputs of its own, which are then checked instead."""
    reference: Callable[..., tuple[Any, ...]]
    """(*inputs) -> the outputs in plain torch, which every config must give: see ``check``."""
    invalid: Callable[[Mapping[str, int], Mapping[str, int], DeviceLimits], str | None] = field(
        default=lambda config, shape, limits: None
    )
    """(config, shape, limits) -> the hardware reason why this config is not worth compiling, or None. ``shape``: see
    :meth:`sizes`."""
    excluded: Callable[[Mapping[str, int], Mapping[str, int]], str | None] = field(default=lambda config, shape: None)
    """(config, shape) -> why this config is no answer to the problem on any hardware, or None. Never asked of the
    default."""
    layout_sizes: Mapping[str, int] = field(default_factory=dict)
    """dim -> its largest size on the problems that check group layouts, where it would be large and changes no binary.
    Problems that then agree are checked once for all that are timed."""
    edges: Callable[[Problem], Iterable[Edge]] = field(default=lambda problem: ())
    """The problem that is timed -> the edges it is checked on; see :mod:`fp8tune_kernels.edges`."""
    span: Span | None = None
    """The lookup of a key without a row leaves out configs that do not suit it. A kernel of this package says it in
    :mod:`fp8tune_kernels.catalog`."""
    input_layouts: tuple[str, ...] = ("contiguous",)
    """What :attr:`Problem.input_layout` may be: each problem is swept with each."""
    routed: bool = False
    """Whether the kernel has groups, and so problems have a routing."""
    scale_modes: tuple[str, ...] = ()
    """What :attr:`Problem.scale_mode` may be, the usual one first; none for a kernel without scales."""
    interpreted: Mapping[str, int] = field(default_factory=dict)
    """dim -> its largest size on Triton's interpreter, for about a second: best a prime, which no block divides.
    Dims that are not named: :data:`INTERPRETED_SIZES`."""
    scaled_down: Callable[[Problem], Problem] = None  # type: ignore[assignment]  # see __post_init__
    """The problem at a size for the interpreter; derived from ``interpreted`` where it is not given."""
    check: str = "exact"
    """One of :data:`CHECKS`."""
    tolerance: Tolerance | None = None
    """The bound of ``check="tolerance"``; ``reference`` then gives float64 tensors of the outputs' shapes."""
    prepare: Callable[[tuple[Any, ...], tuple[Any, ...]], None] | None = None
    """(inputs, outputs): puts into outputs what a launch reads there, such as zeros of an accumulator. Called before
    each launch, off the clock; None for a kernel that only writes its outputs."""
    constrain: Callable[[tuple[Any, ...]], None] | None = None
    """(inputs): puts back into inputs what the kernel relies on, such as zeros between groups. Called after other
    values were written into them, on an edge or where sums must be exact; ``inputs`` gives it already."""
    unwritten: Callable[[tuple[Any, ...], tuple[Any, ...]], None] | None = None
    """(inputs, outputs): puts into outputs what ``reference`` has where a launch writes nothing, such as past the last
    group. Called before each launch that is checked, and never for one that is timed."""
    configs: tuple[NamedInts, ...] = ()
    """The grid as a list, where it is no product of ``axes``; ``axes`` then has the values that occur in it."""
    recorded: tuple[Problem, ...] = ()
    """The problems of a recording, which take the place of ``problems``."""
    in_dtypes: tuple[str, ...] = ("bfloat16",)
    """Input dtypes, of :data:`DTYPES`: each problem is swept with each."""
    uses_fp8: bool = False
    """Whether a problem has an ``fp8_dtype``."""
    flops: Callable[[Mapping[str, int]], int] | None = None
    """shape -> floating-point operations (a multiply and an add are two), of a kernel that may be bound by them."""
    bytes_moved: Callable[[Mapping[str, int]], int] = None  # type: ignore[assignment]  # see __post_init__
    """shape (see :meth:`sizes`) -> the least bytes any implementation moves: inputs read once, outputs written once.
    Where it is not given, derived from ``inputs`` and ``outputs`` on ``meta``, see :func:`_bytes_moved`: leave it out
    where ``in_dtypes`` has several and the lookup key does not name the dtype."""

    def __post_init__(self) -> None:
        for name, derive in (("bytes_moved", _bytes_moved), ("scaled_down", _scaled_down)):
            function = getattr(self, name)
            if function is None or isinstance(function, _Derived):  # a copy by dataclasses.replace derives anew
                object.__setattr__(self, name, _Derived(functools.partial(derive, self)))

    def bytes_of(self, problem: Problem) -> int:
        """``bytes_moved`` of a problem: with its dtype, where the spec does not say how many."""
        if isinstance(inspect.unwrap(self.bytes_moved), _Derived):
            return self.bytes_moved(_plain(self, problem.shape, problem.in_dtype))  # type: ignore[arg-type]
        return self.bytes_moved(self.sizes(problem))

    def sizes(self, problem: Problem) -> NamedInts:
        """The shape of a problem; where the lookup key names the input dtype, with :data:`DTYPE_FLAG`."""
        if DTYPE_FLAG not in self.key or problem.in_dtype not in DTYPES:
            return problem.shape
        return NamedInts({**problem.shape, DTYPE_FLAG: DTYPES.index(problem.in_dtype)})

    @property
    def check_text(self) -> str:
        """The check, as rows say it: ``exact``, or ``tolerance 1e-03 relative + 1e-05 absolute of float64``."""
        return f"tolerance {self.tolerance} of float64" if self.check == "tolerance" else self.check

    def lookup_key(self, problem: Problem) -> NamedInts:
        """The table key of a problem. Raises KeyError where ``key`` names what the problem does not have."""
        values = {LAYOUT_FLAG: int(problem.input_layout == "transposed"), **problem.shape}
        if problem.in_dtype in DTYPES:
            values.setdefault(DTYPE_FLAG, DTYPES.index(problem.in_dtype))
        values.update({f"{dim}_bucket": bucket(size) for dim, size in problem.shape.items()})
        return NamedInts([(name, values[name]) for name in self.key])


class _Derived:
    """A function of a shape or a problem that a spec did not give; remembers, as ``inputs`` may take long on meta."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = functools.cache(function)

    def __call__(self, subject: Any) -> Any:
        return self._function(subject if isinstance(subject, Problem) else NamedInts(subject))


def _plain(spec: KernelSpec, shape: Mapping[str, int], in_dtype: str) -> Problem:
    """The problem of a shape whose bytes are counted."""
    fp8_dtype, scale_mode = "float8_e4m3fn" if spec.uses_fp8 else "", (*spec.scale_modes, "")[0]
    routing = ROUTINGS[0] if spec.routed else "none"
    return Problem(spec.name, NamedInts(shape), routing, "contiguous", in_dtype, fp8_dtype, scale_mode)


def _bytes_moved(spec: KernelSpec, subject: Problem | NamedInts) -> int:
    """The bytes of all inputs and outputs, but for float32 and int32 beside narrower ones: scales and offsets."""
    problem = subject if isinstance(subject, Problem) else _plain(spec, subject, spec.in_dtypes[0])
    shape = problem.shape
    if math.prod(shape.values()) >= 2**58:  # meta tensors have sizes of 64 bits
        return math.prod(shape.values())
    if spec.routed and shape.get("G") == 0:  # no offsets at all
        return 0
    inputs = spec.inputs(problem, "meta")
    tensors = [value for value in (*inputs, *spec.outputs(*inputs)) if hasattr(value, "nbytes")]
    beside = {"torch.float32", "torch.int32"} - {f"torch.{problem.in_dtype}"}
    narrow = [tensor for tensor in tensors if str(tensor.dtype) not in beside]
    return sum(tensor.nbytes for tensor in narrow or tensors)


def _scaled_down(spec: KernelSpec, problem: Problem) -> Problem:
    most = {**INTERPRETED_SIZES, **spec.interpreted}
    others = sum(dim not in most for dim in problem.shape)
    largest = _INTERPRETED_OTHERS[min(others, len(_INTERPRETED_OTHERS)) - 1]
    shape = NamedInts([(dim, min(size, most.get(dim, largest))) for dim, size in problem.shape.items()])
    return replace(problem, shape=shape)


def bucket(size: int) -> int:
    """``size`` rounded down to a power of two (0 stays 0): how M enters a lookup key."""
    return 1 << (size.bit_length() - 1) if size > 0 else 0
