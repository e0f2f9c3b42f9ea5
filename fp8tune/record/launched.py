"""One kernel in the recorded process: its launches by signature, and what is read of the first of each."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8tune.autotuned.encoding import (
    Unrecordable,
    attribute_of,
    chain,
    config_of,
    encoded,
    function_name,
    python_function,
)
from fp8tune.autotuned.ir import Usage, addresses_in, argument_names, usage_of
from fp8tune.errors import one_line
from fp8tune.record import times
from fp8tune.record.grids import grid_of
from fp8tune.record.signatures import NO_PARAMETERS, Signatures, WarmsUp
from fp8tune.record.tensors import described, is_descriptor, is_tensor, with_values
from fp8tune.recording import Argument, Config, Kernel, Launch, Scalar

WITH_VALUES = 256
"""Of so many distinct launches of a kernel values are read, each time with a synchronization."""
MOST_LAUNCHES = 2048
"""Distinct launches of a kernel that are kept; those beyond are counted only."""
MANY_VALUES = 64
"""Distinct values of a number after which launches are no longer told apart by it: a seed, a step."""

NEVER = sys.maxsize

DECLARED: weakref.WeakKeyDictionary[Any, Sequence[Any]] = weakref.WeakKeyDictionary()
"""Autotuner -> the configs it was made with."""


@dataclass(slots=True)
class Entry:
    """Launches with one signature."""

    count: int = 0
    due: int = 0
    """The count from which something is to be done beyond counting."""
    launch: Launch | None = None
    refusal: str = ""
    compiled: Any = None
    samples: times.Samples = field(default_factory=times.Samples)
    signature: Hashable = None
    following: Any = None
    """What was launched next the last time: most programs repeat themselves."""

    def __post_init__(self) -> None:
        self.following = self


class Launched:
    """An autotuner, or a bare jitted function, and what was launched through it."""

    def __init__(self, kernel: Any, is_autotuned: bool) -> None:
        self.kernel = kernel
        self.is_autotuned = is_autotuned
        self.function = python_function(kernel)
        self.names: tuple[str, ...] = tuple(kernel.arg_names)
        self.signatures = Signatures(self.names)
        self.entries: dict[Hashable, Entry] = {}
        self.last = Entry(signature=object())  # equal to no launch
        self.calm = 0
        """Launches in a row that were only counted."""
        self.unseen = 0
        """Launches until the next that is looked at."""
        self.weight = 1
        """Launches that the next one stands for."""
        self.tuning_s = 0.0
        self.by_torch_compile = False
        self._place: tuple[str, str] | None = None
        self._script: str | None = getattr(sys.modules["__main__"], "__file__", None)  # gone when Python ends
        self._usages: dict[int, Usage] = {}
        self._heuristics = {
            name: rule
            for one in chain(kernel)
            if type(one).__name__ == "Heuristics"
            for name, rule in one.values.items()
        }
        jitted = [one for one in chain(kernel) if one is not self.function][-1]
        self._constexprs = _constexprs(jitted, self.function)
        self._defaults = _defaults(self.function)

    def run(self, launch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A launch that is not only counted. ``launch`` is the function that the recorder stands before."""
        try:
            entry = self._entry(args, kwargs)
        except WarmsUp:
            return launch(*args, **kwargs)
        except Exception as error:
            self.fail(error, args, kwargs)
            return launch(*args, **kwargs)
        if entry.launch is None and not entry.refusal:
            self.calm, self.weight = 0, 1
            return self._first(entry, launch, args, kwargs)
        entry.count += self.weight
        if entry.count < entry.due:
            return launch(*args, **kwargs)
        return self._sampled(entry, launch, args, kwargs)

    def fail(self, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Calls like this one are counted and launched, no more."""
        entry = self.entries.setdefault(NEVER, Entry(due=NEVER, refusal=_reason(error)))
        entry.count += 1
        self.signatures.refuse(args, kwargs, NEVER)

    def _refuse(self, entry: Entry, error: Exception) -> None:
        entry.due, entry.refusal = NEVER, _reason(error)

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        if kwargs.get("warmup"):
            raise WarmsUp
        if "warmup" not in kwargs:
            kwargs = {**kwargs, "warmup": False}
        signature = self.signatures.add(args, kwargs)(args, kwargs)
        entry = self.entries.get(signature)
        if entry is None and len(self.entries) < MOST_LAUNCHES:
            entry = self.entries[signature] = Entry(signature=signature)
            if len(self.entries) % MANY_VALUES == 0:
                self._ignore_numbers()
        elif entry is None:
            entry = self.entries.setdefault(
                NEVER, Entry(due=NEVER, refusal=f"more than {MOST_LAUNCHES} distinct launches")
            )
        return entry

    def _ignore_numbers(self) -> None:
        """Stop telling launches apart by a number that differs in nearly all of them."""
        values: dict[str, set[Any]] = {}
        for entry in list(self.entries.values()):
            for one in entry.launch.arguments if entry.launch else ():
                if isinstance(one, Scalar) and type(one.value) in (int, float) and not one.is_constexpr:
                    values.setdefault(one.name, set()).add(one.value)
        keys = set(getattr(self.kernel, "keys", ()))
        many = {name for name, held in values.items() if 2 * len(held) > len(self.entries) and name not in keys}
        if many:
            self.signatures.ignore(many)

    def _first(self, entry: Entry, launch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The first launch with a signature, or the first outside the capture of a graph."""
        tuner = self.kernel if self.is_autotuned else None
        key: tuple[Any, ...] = ()
        bench_s = getattr(tuner, "bench_time", None)
        try:
            if tuner is not None:
                key = tuning_key(tuner, args, kwargs)
            described = self._described(key, args, kwargs)
        except Exception as error:
            described = None
            self._refuse(entry, error)
        compiled = launch(*args, **kwargs)
        entry.count += 1
        try:
            if (after_s := getattr(tuner, "bench_time", None)) != bench_s:  # else nothing was tuned
                self.tuning_s += after_s or 0.0
            if described is not None:
                config = None if tuner is None else tuner.configs[0] if len(tuner.configs) < 2 else tuner.cache.get(key)
                entry.launch = replace(described, config=config_of(config) if config is not None else None)
                entry.compiled = compiled if hasattr(compiled, "asm") else None
                entry.due = _next(entry.count, entry.launch.in_graph)
        except Exception as error:
            self._refuse(entry, error)
        return compiled

    def _sampled(self, entry: Entry, launch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A launch that is timed, and read where the first one was not, because it went into a graph."""
        taken: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        try:
            if not times.is_capturing():
                assert entry.launch is not None
                if entry.launch.in_graph:
                    entry.launch = self._read(entry.launch, args, kwargs)
                if times.is_on_gpu():
                    entry.samples.read()
                    taken = entry.samples.taken()
            entry.due = _next(entry.count, entry.launch is not None and entry.launch.in_graph)
        except Exception as error:
            self._refuse(entry, error)
        with taken:
            return launch(*args, **kwargs)

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def _described(self, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
        bound = self._bound(args, kwargs)
        tensors = {name: value for name, value in bound.items() if _is_memory(value) and name in self.names}
        found = described(tensors)
        arguments: list[Argument] = []
        for name in self.names:
            if name in found:
                arguments.append(found[name])
            elif name in bound:
                arguments.append(Scalar(name, encoded(bound[name], f"argument {name}"), name in self._constexprs))
        options = {name: value for name, value in bound.items() if name not in (*self.names, *NO_PARAMETERS)}
        launch = Launch(
            tuple(arguments),
            self._grid(bound),
            tuple(encoded(value, "a key argument") for value in key),
            {name: encoded(value, f"option {name}") for name, value in options.items()},
            configs=self._set_by_program() if self.is_autotuned else None,
            in_graph=True,
        )
        return launch if times.is_capturing() else self._read(launch, args, kwargs)

    def _read(self, launch: Launch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
        """The launch with statistics and values, before it runs."""
        bound = self._bound(args, kwargs)
        before = {one.name: one for one in launch.arguments if not isinstance(one, Scalar)}
        if not before or len(self.entries) > WITH_VALUES:
            return replace(launch, in_graph=False)
        found = with_values(before, {name: bound[name] for name in before})
        return replace(launch, in_graph=False, arguments=tuple(found.get(one.name, one) for one in launch.arguments))

    def _grid(self, bound: Mapping[str, Any]) -> Any:
        known = {**self._defaults, **{name: value for name, value in bound.items() if name in self.names}}
        if self.is_autotuned:
            declared = self._declared()
            more = (config for config in self.kernel.configs if config not in declared)
            configs = [config.kwargs for config in (*declared, *more)]
        else:  # what could be tuned are the constants that the caller gives
            configs = [{name: value for name, value in known.items() if name in self._constexprs}]
        return grid_of(bound["grid"], known, configs, self._heuristics)

    def _declared(self) -> Sequence[Any]:
        """The configs that the autotuner was made with: a subclass may have put others in their place."""
        return DECLARED.get(self.kernel) or self.kernel.configs

    def _set_by_program(self) -> tuple[Config, ...] | None:
        """The list of this launch where it is not the one that was declared. A subclass that looks for a config of its
        own before it launches leaves that one: no limit of the program's."""
        declared, now = self._declared(), self.kernel.configs
        is_own_list = type(self.kernel).__name__ == "Autotuner"
        return tuple(map(config_of, now)) if is_own_list and list(now) != list(declared) else None

    def document(self) -> Kernel:
        """All that was recorded, as it is now."""
        entries = list(self.entries.values())
        launches = [self._launch(entry) for entry in entries if entry.launch is not None and not entry.refusal]
        skipped: dict[str, int] = {}
        for entry in entries:
            if entry.refusal:
                skipped[entry.refusal] = skipped.get(entry.refusal, 0) + entry.count
        configs = self._declared() if self.is_autotuned else ()
        try:
            recorded = list(map(config_of, configs))
            for config in (config for launch in launches for config in launch.configs or ()):
                recorded += [config] if config not in recorded else []
        except Unrecordable as error:
            recorded, skipped = [], {**skipped, str(error): sum(entry.count for entry in entries)}
        if self._place is None:  # once: all modules may be searched
            self._place = _place(self.kernel, self._script)
        name, refusal = self._place
        return Kernel(
            name,
            refusal=refusal or self._refusal(launches, skipped),
            file=self.function.__code__.co_filename,
            is_autotuned=self.is_autotuned,
            parameters=self.names,
            key=tuple(map(str, getattr(self.kernel, "keys", ()))),
            configs=tuple(recorded),
            tuning_s=self.tuning_s,
            launches=tuple(launches),
            skipped=skipped,
        )

    def _refusal(self, launches: Sequence[Launch], skipped: Mapping[str, int]) -> str:
        if not launches and skipped:
            return next(iter(skipped))
        if not launches and self.by_torch_compile:
            return "torch.compile launched a copy of its own: record with TORCH_COMPILE_DISABLE=1"
        return ""

    def _launch(self, entry: Entry) -> Launch:
        assert entry.launch is not None
        usage = self._usage(entry.compiled)
        arguments = tuple(
            replace(one, is_loaded=usage[one.name].is_loaded, is_stored=usage[one.name].is_stored)
            if not isinstance(one, Scalar) and one.name in usage
            else one
            for one in entry.launch.arguments
        )
        launch = replace(entry.launch, arguments=arguments, count=entry.count, gpu_us=entry.samples.median_us())
        return replace(launch, addresses=addresses_in(usage))

    def _usage(self, compiled: Any) -> Usage:
        if compiled is None:
            return {}
        if id(compiled) not in self._usages:
            try:
                names = argument_names(compiled.src.signature)
                self._usages[id(compiled)] = usage_of(compiled.asm["ttir"], names)
            except Exception:  # fp8tune record compiles it again for this
                self._usages[id(compiled)] = {}
        return self._usages[id(compiled)]


def tuning_key(tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """As ``Autotuner.run`` builds it: values of the key arguments, then the dtypes of all, in the order of the call.

    The same in Triton 3.6.0, 3.7.1 and on its main branch at 0094017.
    """
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    given = {name: value for name, value in given.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    return (*key, *(str(value.dtype) for value in given.values() if hasattr(value, "dtype")))


def _place(kernel: Any, script: str | None) -> tuple[str, str]:
    """The name that a kernel can be imported by, else its qualified name and why it cannot be.

    ``script``: the file of ``__main__``.
    """
    name, function = attribute_of(kernel), python_function(kernel)
    if name is None:
        qualified = function.__qualname__
        if "<lambda>" in qualified:
            return function_name(kernel), "a lambda: write it as a function at the top of a module"
        if "<locals>" in qualified:
            maker = qualified.partition(".<locals>")[0]
            return function_name(kernel), f"a closure, made inside {maker}: move it to the top of its module"
        return function_name(kernel), f"no module has it as an attribute: assign it in {function.__module__}"
    module, _, attribute = name.partition(":")
    if module != "__main__":
        return name, ""
    if script is None or not _is_guarded(Path(script)):
        return name, 'defined in __main__: move it to a module, or the program under if __name__ == "__main__"'
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return (f"{spec.name}:{attribute}" if spec else f"{Path(script).absolute()}:{attribute}"), ""


def _is_guarded(script: Path) -> bool:
    """Whether a script can be imported without running its program, as far as its text tells."""
    try:
        statements = ast.parse(script.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(one, ast.If) and "__name__" in ast.unparse(one.test) for one in statements)


def _next(count: int, is_unread: bool) -> int:
    if is_unread:
        return count + 1
    return next((due for due in times.NEXT_SAMPLES if due > count), NEVER)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Unrecordable) else f"the recorder failed: {one_line(error)}"


def _is_memory(value: Any) -> bool:
    return is_tensor(value) or is_descriptor(value)


def _constexprs(jitted: Any, function: Any) -> frozenset[str]:
    if hasattr(jitted, "params"):
        return frozenset(parameter.name for parameter in jitted.params if parameter.is_constexpr)
    return frozenset(name for name, hint in function.__annotations__.items() if "constexpr" in str(hint))


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
