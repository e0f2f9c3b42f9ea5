"""One kernel in the recorded process: its launches by signature, and a description of each signature's first."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fp8tune.errors import one_line
from fp8tune.replay.naming import place_of
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Scalar, Tensor, merged_by
from fp8tune.replay.values import Unrecordable, config_of, encoded
from fp8tune.replay.watch import describing, times
from fp8tune_kernels.pinning import configs_of, keys_of
from fp8tune_kernels.tuners import chain, flattened, is_descriptor, is_tensor, python_function, tensor_in, tuning_key

WITH_VALUES = 256  # distinct launches of a kernel whose values are read, each time with a synchronization
MOST_LAUNCHES = 2048  # distinct launches of a kernel that are kept; those beyond are counted only
MANY_VALUES = 64  # distinct values of a number after which launches are no longer told apart by it: a seed, a step
NEVER = sys.maxsize

CALM = 4096
"""After so many launches of a kernel without a new kind only some are looked at, and counts are estimates. Looking at
all of them took 13.2 +- 2.6 us a launch on an H200 (torch 2.11, Triton 3.6): 11 % of a 24 ms step of 200 launches."""
STRIDES = (10, 22, 6, 17, 27, 3, 14)
"""Launches that pass between two looks, in turn: no step repeats itself in that rhythm. 14 in the mean."""

DECLARED: weakref.WeakKeyDictionary[Any, Sequence[Any]] = weakref.WeakKeyDictionary()
"""Autotuner -> the configs it was made with: a subclass may put others in their place."""

_SCALARS = frozenset({int, bool, float, str, type(None)})  # types of most arguments, which are told apart by value
_NOT_ARGUMENTS = frozenset({"grid", "warmup"})


def signature_of(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], ignored: Collection[str] = ()
) -> Hashable:
    """Return what tells a call from others but for the values of tensors, in a few microseconds.

    These are names, scalars but for ``ignored``, and the layout, alignment and overlap of tensors.
    """
    parts: list[Hashable] = []
    addresses: list[int] = []
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if name in _NOT_ARGUMENTS:
            continue
        if type(value) in _SCALARS:
            if name not in ignored:
                parts += name, value
        elif is_tensor(value):
            parts += name, value.dtype, value.shape, value.is_contiguous() or value.stride()
            addresses.append(value.data_ptr())
        elif is_descriptor(value):
            parts += name, value.base.dtype, tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
            addresses.append(value.base.data_ptr())
        else:
            parts += name, _form(value) if type(value) is tuple else value
    every = 0
    for address in addresses:
        every |= address
    if every & 15:  # else all are aligned, as nearly always
        parts.append(tuple([address & -address & 15 for address in addresses]))
    if len(set(addresses)) < len(addresses):
        parts.append(tuple(map(addresses.index, addresses)))
    return tuple(parts)


def _form(value: Any) -> Hashable:
    """Return the signature of a tuple, which may hold tensors."""
    if type(value) is tuple:
        return tuple(map(_form, value))
    if is_tensor(value):
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15
    return value  # type: ignore[no-any-return]


@dataclass(slots=True)
class Entry:
    """Launches with one signature."""

    count: int = 0
    due: int = 0  # the count from which something is to be done beyond counting
    launch: Launch | None = None
    refusal: str = ""
    compiled: Any = None
    samples: times.Samples = field(default_factory=times.Samples)

    @contextlib.contextmanager
    def refused_on_error(self) -> Iterator[None]:
        """Only count these launches from now on if the block raises."""
        try:
            yield
        except Exception as error:
            self.due, self.refusal = NEVER, _reason(error)

    def schedule(self) -> None:
        """Set the launch of which more is wanted than its count: the next if none was read, else the next sample."""
        is_unread = self.launch is not None and self.launch.in_graph
        later = (count for count in times.NEXT_SAMPLES if count > self.count)
        self.due = self.count + 1 if is_unread else next(later, NEVER)


class WatchedKernel:
    """An autotuner, or a bare jitted function, and its launches."""

    def __init__(self, kernel: Any, is_autotuned: bool = True, stores_integers: bool = True) -> None:
        self.kernel, self.is_autotuned, self._stores_integers = kernel, is_autotuned, stores_integers
        self.function = python_function(kernel)
        self.names: tuple[str, ...] = tuple(kernel.arg_names)
        self.keys = tuple(map(str, getattr(kernel, "keys", ())))
        self.ignored = set[str]()  # numbers by which launches are not told apart
        self.entries: dict[Hashable, Entry] = {}
        self.calm = 0  # launches in a row that were only counted
        self.unseen = 0  # launches until the next that is looked at
        self.weight = 1  # launches that the next one stands for
        self._script: str | None = getattr(sys.modules["__main__"], "__file__", None)  # gone when Python ends
        heuristics = (item.values.items() for item in chain(kernel) if type(item).__name__ == "Heuristics")
        self._heuristics = {name: rule for items in heuristics for name, rule in items}
        hints = self.function.__annotations__.items()
        self._constexprs = frozenset(name for name, hint in hints if "constexpr" in str(hint))
        parameters = inspect.signature(self.function).parameters.values()
        self._defaults = {item.name: item.default for item in parameters if item.default is not item.empty}

    def is_counted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Count a launch and return True if no more is to be done. Called at each launch: written for speed."""
        if self.unseen > 0:
            self.unseen -= 1
            return True
        try:
            entry = self.entries[signature_of(self.names, args, kwargs, self.ignored)]
        except Exception:  # a new signature, or arguments that have none
            return False
        count = entry.count + self.weight
        if count >= entry.due:
            return False
        entry.count = count
        self.calm += 1
        if self.calm > CALM:
            self.unseen = STRIDES[self.calm % len(STRIDES)]
            self.weight = self.unseen + 1
        return True

    def run(self, launch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a launch that is not only counted. ``launch`` is Triton's own function."""
        try:
            entry = self._entry(signature_of(self.names, args, kwargs, self.ignored))
        except Exception as error:  # calls like this one are only counted
            entry = self.entries.setdefault(NEVER, Entry(due=NEVER, refusal=_reason(error)))
        if entry.launch is None and not entry.refusal:
            self.calm, self.weight = 0, 1
            return self._first(entry, launch, args, kwargs)
        entry.count += self.weight
        timed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if entry.count >= entry.due:
            with entry.refused_on_error():
                if not times.is_capturing():
                    if entry.launch is not None and entry.launch.in_graph:  # the first one was not read
                        entry.launch = self._read(entry.launch, self._flat(self._bound(args, kwargs)))
                    if times.is_on_gpu():
                        entry.samples.read()
                        timed = entry.samples.taken()
                entry.schedule()
        with timed:
            return launch(*args, **kwargs)

    def _entry(self, signature: Hashable) -> Entry:
        if signature in self.entries:
            return self.entries[signature]
        if len(self.entries) >= MOST_LAUNCHES:
            refusal = f"more than {MOST_LAUNCHES} distinct launches"
            return self.entries.setdefault(NEVER, Entry(due=NEVER, refusal=refusal))
        entry = self.entries[signature] = Entry()
        if len(self.entries) % MANY_VALUES == 0:
            self._ignore_numbers()
        return entry

    def _ignore_numbers(self) -> None:
        """Stop telling launches apart by a number that differs in nearly all of them."""
        values: dict[str, set[Any]] = {}
        for entry in list(self.entries.values()):
            for item in entry.launch.arguments if entry.launch else ():
                if isinstance(item, Scalar) and type(item.value) in (int, float) and not item.is_constexpr:
                    values.setdefault(item.name, set()).add(item.value)
        many = (name for name, numbers in values.items() if 2 * len(numbers) > len(self.entries))
        self.ignored |= {*many} - {*self.keys}

    def _first(self, entry: Entry, launch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make the first launch with a signature."""
        described = None
        with entry.refused_on_error():
            described = self._described(args, kwargs)
        compiled = launch(*args, **kwargs)
        entry.count += 1
        with entry.refused_on_error():
            if described is not None:
                configs = getattr(self.kernel, "configs", ())  # a subclass may have changed them
                config = next(iter(configs), None)
                if len(configs) > 1:
                    config = configs_of(self.kernel).get(tuning_key(self.kernel, args, kwargs))
                entry.launch = replace(described, config=None if config is None else config_of(config))
                entry.compiled = compiled if hasattr(compiled, "asm") else None
                entry.schedule()
        return compiled

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def _flat(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of a call in their order, items of tuples with tensors one by one."""
        try:
            return dict(item for name in self.names if name in bound for item in flattened(name, bound[name]))
        except TypeError as error:
            raise Unrecordable(str(error)) from None

    def _described(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
        """Describe a launch before it is made, with values where they can be read."""
        bound = self._bound(args, kwargs)
        flat, key = self._flat(bound), tuning_key(self.kernel, args, kwargs) if self.is_autotuned else ()
        tensors = describing.described({name: item for name, item in flat.items() if tensor_in(item) is not None})
        known = {**self._defaults, **{name: value for name, value in bound.items() if name in self.names}}
        configs = [config.kwargs for config in self._declared()]
        if not self.is_autotuned:  # what could be tuned are the constants that the caller gives
            configs = [{name: value for name, value in known.items() if name in self._constexprs}]
        grid = describing.grid_of(bound["grid"], known, configs, self._heuristics)
        launch = self._launch(bound, flat, tensors, grid)
        launch = replace(launch, key=tuple(encoded(value, "a key argument") for value in key))
        return launch if times.is_capturing() else self._read(launch, flat)

    def _launch(
        self, bound: Mapping[str, Any], flat: Mapping[str, Any], tensors: Mapping[str, Tensor], grid: Grid
    ) -> Launch:
        """Return a launch of which no values have been read."""

        def scalar(name: str) -> Scalar:
            return Scalar(name, encoded(flat[name], f"argument {name}"), name.partition("[")[0] in self._constexprs)

        options = {*bound} - {*self.names, *_NOT_ARGUMENTS}
        return Launch(
            tuple(tensors[name] if name in tensors else scalar(name) for name in flat),
            grid,
            options={name: encoded(value, f"option {name}") for name, value in bound.items() if name in options},
            in_graph=True,
        )

    def _read(self, launch: Launch, flat: Mapping[str, Any]) -> Launch:
        """Return the launch with statistics and values, before it runs."""
        before = {item.name: item for item in launch.tensors}
        if before and len(self.entries) <= WITH_VALUES:
            known = describing.with_values(before, {name: flat[name] for name in before}, self._stores_integers)
            launch = launch.with_tensors(lambda tensor: known[tensor.name])
        return replace(launch, in_graph=False)

    def _declared(self) -> Sequence[Any]:
        return (DECLARED.get(self.kernel) or self.kernel.configs) if self.is_autotuned else ()

    def add_trace(self, bound: Mapping[str, Any], grids: Sequence[Any], configs: Sequence[Any]) -> None:
        """Describe a launch that torch.compile traced, and will make with a copy of the kernel.

        ``grids``: the programs for each of ``configs``. Tensors have no memory yet, and so no values.
        """
        flat = {name: bound[name] for name in self.names if name in bound}
        tensors: dict[str, Tensor] = {}
        for index, (name, value) in enumerate(flat.items()):
            if hasattr(value, "stride") and hasattr(value, "dtype"):
                shape, strides = tuple(map(_hint, value.shape)), tuple(map(_hint, value.stride()))
                tensors[name] = Tensor(name, str(value.dtype).removeprefix("torch."), shape, strides, storage=index)
            elif hasattr(value, "node"):
                flat[name] = _hint(value)
        axes = tuple(dict.fromkeys(name for config in configs for name in config.kwargs))
        rows = [[encoded(config.kwargs.get(axis), axis) for axis in axes] for config in configs] or [[]]
        table = tuple((tuple(row), tuple(map(_hint, grid))) for row, grid in zip(rows, grids, strict=False))
        launch = self._launch(bound, flat, tensors, Grid(axes, table))
        dtypes = {item.name: f"torch.{item.dtype}" for item in launch.tensors}
        known = launch.scalars | dtypes
        key = (*(known[name] for name in self.keys if name in known), *dtypes.values()) if self.is_autotuned else ()
        launch = replace(launch, key=key, is_traced=True)
        self.entries.setdefault(("traced", launch.id), Entry(count=1, due=NEVER, launch=launch))

    @functools.cached_property
    def _place(self) -> tuple[str, str]:
        return place_of(self.kernel, self._script)  # once: all modules may be searched

    def document(self, codes: dict[str, Any]) -> Kernel:
        """Return all that was recorded up to now; puts the launches' compiled code into ``codes``."""
        entries, skipped = list(self.entries.values()), Counter[str]()
        recorded: list[Launch] = []
        for entry in entries:
            if entry.refusal:
                skipped[entry.refusal] += entry.count
            elif entry.launch is not None:
                gpu_us, code = entry.samples.median_us(), _code(entry.compiled, codes)
                recorded.append(replace(entry.launch, count=entry.count, gpu_us=gpu_us, code=code))
        configs: list[Config] = []
        try:
            configs = list(map(config_of, self._declared()))
        except Unrecordable as error:
            recorded, skipped[str(error)] = [], sum(entry.count for entry in entries)
        (name, refusal), report = self._place, keys_of(self.kernel)
        tuned_s: Mapping[str, float] = report.get("tuned_s", {})
        return Kernel(
            name,
            refusal=refusal or ("" if recorded else next(iter(skipped), "")),
            file=self.function.__code__.co_filename,
            is_autotuned=self.is_autotuned,
            parameters=self.names,
            key=self.keys,
            configs=tuple(configs),
            tuning_s=sum(tuned_s.values()),
            tuned_s=tuned_s,
            table=report.get("table", ""),
            table_keys=report.get("keys", {}),
            launches=merged_by(recorded, lambda launch: launch.id),
            skipped=dict(skipped),
        )


def plain_signature(signature: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the type of each argument as text, of tuples item by item."""
    for name, kind in signature.items():
        if isinstance(kind, tuple | list):
            yield from plain_signature({f"{name}[{index}]": inner for index, inner in enumerate(kind)})
        else:
            yield str(name), str(kind)


def _code(compiled: Any, codes: dict[str, Any]) -> str:
    """Keep the argument names and the text of compiled code; returns its key, empty for the interpreter's."""
    try:
        text = compiled.asm["ttir"]
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        codes[key] = [dict(plain_signature(compiled.src.signature)), text]
        return key
    except Exception:  # fp8tune record compiles it again
        return ""


def _hint(size: Any) -> int:
    """Return a size that torch.compile traces, without fixing it in the compiled program."""
    return int(size.node.hint if hasattr(size, "node") else size)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Unrecordable) else f"the recorder failed: {one_line(error)}"
