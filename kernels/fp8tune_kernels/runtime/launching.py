"""Launch a kernel again without asking Triton which binary it is, and an operator again without its Python code.

``kernel[grid](...)`` binds and specializes every argument at each call: half of an operator's host time.
:func:`launch_kernel` remembers a binary by all that Triton chose it by, and gives it to Triton's launcher, with
pointers as integers, which spares the driver a question for each.

Most of the other half goes into checks, lookups and sizes, which depend on the layouts of arguments alone: shapes,
strides, dtypes, alignments. :func:`replayed` records the second call with the same layouts, and repeats the
allocations, launches and torch operators of later ones. A layout that never comes back costs no recording. Tensors are
freed after their last use.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from triton import knobs
from triton.runtime import _allocation as triton_allocation
from triton.runtime import driver

from .lookup import caches

_REMEMBERS = torch.version.cuda is not None
"""On AMD Triton specializes on more than this module knows of: on tensors below 2 GiB."""

_NO_ALLOCATOR = triton_allocation._NULL_ALLOCATOR

Launch = tuple[Any, Any, Any, tuple[Any, ...]]
"""Of a compiled kernel: what runs it, its function, its packed metadata, its arguments that follow the sizes."""

_launches: dict[tuple[Any, ...], Launch] = {}
"""By what a call is given, which takes less time to tell than what Triton chooses by: sizes as they are."""

MOST_LAUNCHES = 4096
"""A process whose numbers of rows never repeat begins anew."""

_binaries: dict[tuple[Any, ...], Launch] = {}
"""By what Triton chooses by."""


class _Recorders(threading.local):
    """Recorder of this thread's launches."""

    current: _Recorder | None = None


_recorders = _Recorders()


def launch_kernel(
    kernel: Any,
    programs: int,
    tensors: Sequence[torch.Tensor | None],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    config: Mapping[str, int],
) -> None:
    """``kernel[(programs,)](*tensors, *sizes, *constants, **config)``, faster from the second time on.

    All tensors are on the current device, and the first is not None. An argument keeps its type: ``True`` and ``1``
    count as the same. Tensor descriptors that a kernel makes lie in memory of torch's.
    """
    first = tensors[0]
    assert first is not None
    recorder = _recorders.current
    _set_allocator()
    if not (_REMEMBERS and first.is_cuda) or _is_hooked():
        run_by_triton = functools.partial(_run, kernel[(programs,)], (*sizes, *constants), dict(config))
        if recorder is None:
            run_by_triton(*tensors)
        else:
            recorder.launch_by_triton(run_by_triton, tensors)
        return
    device = first.get_device()
    pointers: list[int | None] = []
    kinds: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            kinds.append(None)
        else:
            pointers.append(pointer := tensor.data_ptr())
            kinds.append((tensor.dtype,) if pointer & 15 else tensor.dtype)
    key = (kernel.fn, device, sizes, constants, *config, *config.values(), *kinds)
    answer = _launches.get(key)
    if answer is None:
        choice = (device, *_specialization(kernel, kinds, sizes, constants, config))
        answer = _binaries.get(choice)
        if answer is None:
            compiled = kernel[(programs,)](*tensors, *sizes, *constants, **config)
            names = kernel.arg_names[len(tensors) + len(sizes) + len(constants) :]  # compiled in, but counted
            rest = (*constants, *(config[name] for name in names))
            _binaries[choice] = answer = compiled.run, compiled.function, compiled.packed_metadata, rest
            if recorder is not None:
                recorder.attempt(recorder.launch, answer, programs, tensors, sizes)
            return
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = answer
    if recorder is not None:
        recorder.attempt(recorder.launch, answer, programs, tensors, sizes)
    run, function, metadata, rest = answer
    stream = driver.active.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *sizes, *rest)


def _specialization(
    kernel: Any,
    kinds: Sequence[Any],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    config: Mapping[str, int],
) -> tuple[Any, ...]:
    """At least as fine as Triton's choice of a binary. ``kinds``: a tensor's dtype, in a tuple if it is not aligned."""
    of_sizes = [(size == 1, size & 15 == 0, size >> 31) for size in sizes]
    return kernel.fn, constants, tuple(config.items()), *kinds, *of_sizes


def _run(kernel: Any, values: tuple[Any, ...], options: Mapping[str, int], *tensors: torch.Tensor | None) -> None:
    kernel(*tensors, *values, **options)


def _set_allocator() -> None:
    if triton_allocation._allocator.get() is _NO_ALLOCATOR:  # of this thread: autograd has its own
        triton.set_allocator(_scratch)


def _is_hooked() -> bool:
    """Return True if a profiler or a debugger listens: Triton's own way serves them."""
    runtime = knobs.runtime
    return bool(
        runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or runtime.add_stages_inspection_hook
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory of the current device, which torch's allocator gives away again in the order of the stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


# Replays

Function = Callable[..., Any]


class Slots(NamedTuple):
    """Tensors of a call: its arguments, and then what it allocates."""

    tensors: list[Any]
    """None before and after use."""
    pointers: list[int | None]
    """Address of each tensor; then a None."""


Instruction = Callable[[Slots, int], None]
"""What a replay does, with the current stream."""

MOST_LAYOUTS = 1024
"""Of one function; then it begins anew."""

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_PLAIN = {type(None), bool, int, str, torch.dtype}
"""Types of most arguments that are no tensors: the check for a tensor takes longer where it fails."""
_READS = {_aten._local_scalar_dense.default, _aten.item.default, _aten.equal.default}
"""Operators whose results Python code may decide by."""


class _Reference(NamedTuple):
    """A tensor in the memory of a slot: the slot's own, or a view of it."""

    slot: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None
    """Shape, strides, and elements from the slot's first to its own."""

    def tensor(self, slots: Slots) -> Any:
        tensor = slots.tensors[self.slot]
        if self.view is None:
            return tensor
        shape, strides, offset = self.view
        return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


class _Step(NamedTuple):
    """An instruction, with the slots that it uses and makes."""

    instruction: Instruction
    uses: frozenset[int]
    makes: frozenset[int]
    is_needed: bool
    """False for an allocation, which can be left out if nothing uses it."""


class _UnrecordableError(Exception):
    """A call that does what a replay cannot."""


class _Recorder(TorchDispatchMode):
    """Records one call of a function. It holds no tensors, so that memory is freed as ever."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.failed = False
        self._count = itertools.count()
        self._slots: dict[int, tuple[int, int, torch.Size, tuple[int, ...], torch.dtype] | None] = {}
        self._arguments = {id(tensor): number for number, tensor in enumerate(tensors)}
        for tensor in tensors:
            self._new_slot(tensor)

    def _new_slot(self, tensor: torch.Tensor, *, is_argument: bool = True) -> int:
        """Give a slot to the memory of a tensor. Arguments may share memory: then no view of it is known."""
        slot, memory = next(self._count), tensor.untyped_storage().data_ptr()
        is_shared = is_argument and memory in self._slots
        entry = (slot, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        self._slots[memory] = None if is_shared else entry
        return slot

    def _allocated(self, tensor: torch.Tensor) -> int:
        """Give a slot to a tensor that the call allocated: a replay does so, if anything uses it."""
        slot = self._new_slot(tensor, is_argument=False)
        options: Any = {"dtype": tensor.dtype, "device": tensor.device}
        empty = functools.partial(torch.empty_strided, tuple(tensor.shape), tensor.stride(), **options)

        def allocate(slots: Slots, _: int) -> None:
            made = slots.tensors[slot] = empty()
            slots.pointers[slot] = made.data_ptr()

        self._add(allocate, (), (slot,), is_needed=False)
        return slot

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the slot of a tensor's memory, and how many bytes after the slot's first it begins."""
        number = self._arguments.get(id(tensor))
        if number is not None:
            return number, 0
        if not tensor.numel():  # it has no memory to be found by
            return self._allocated(tensor), 0
        entry = self._slots.get(tensor.untyped_storage().data_ptr())
        if entry is None:
            raise _UnrecordableError
        return entry[0], tensor.data_ptr() - entry[1]

    def reference(self, tensor: torch.Tensor) -> _Reference:
        """Return how a replay finds a tensor."""
        number = self._arguments.get(id(tensor))
        if number is not None:
            return _Reference(number, None)
        slot, offset = self.place(tensor)
        if not tensor.numel():
            return _Reference(slot, None)
        entry = self._slots[tensor.untyped_storage().data_ptr()]
        assert entry is not None
        if tensor.dtype != entry[4]:
            raise _UnrecordableError
        if (offset, tensor.shape, tensor.stride()) == (0, *entry[2:4]):
            return _Reference(slot, None)
        return _Reference(slot, (tuple(tensor.shape), tensor.stride(), offset // tensor.element_size()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _recorders.current = None  # what the operator itself launches, a replay launches by calling it
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            _recorders.current = self
        self.attempt(self._record, func, args, kwargs or {}, result)
        return result

    def attempt(self, record: Function, *arguments: Any) -> None:
        """Record something by a method of this; after the first that cannot be recorded, nothing."""
        if self.failed:
            return
        try:
            record(*arguments)
        except _UnrecordableError:
            self.failed = True

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func in _EMPTY:
            self._allocated(result)
        elif func in _READS:
            raise _UnrecordableError
        elif not func.is_view:  # a view is found by its memory
            self.called(func, args, kwargs, result)

    def called(self, function: Function, args: Any, kwargs: Any, result: Any = None) -> None:
        """Record a call."""
        uses: list[_Reference] = []

        def referred(tensor: torch.Tensor) -> _Reference:
            uses.append(self.reference(tensor))
            return uses[-1]

        args, kwargs = tree_map_only(torch.Tensor, referred, (args, kwargs))
        made = []
        for number, tensor in enumerate(tree_flatten(result)[0]):
            memory = tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else 0
            if memory and memory not in self._live(uses):
                made.append((number, self._new_slot(tensor, is_argument=False)))
        instruction = _call(function, args, kwargs, made)
        self._add(instruction, (use.slot for use in uses), (slot for _, slot in made))

    def _live(self, uses: Iterable[_Reference]) -> set[int]:
        """Return the memory of an operator's arguments: it may return its argument."""
        slots = {use.slot for use in uses}
        return {memory for memory, entry in self._slots.items() if entry is None or entry[0] in slots}

    def launch(
        self, launch: Launch, programs: int, tensors: Sequence[torch.Tensor | None], sizes: tuple[int, ...]
    ) -> None:
        """Record a launch of a binary."""
        places = [None if tensor is None else self.place(tensor) for tensor in tensors]
        self._add(_launch(launch, programs, places, sizes), (place[0] for place in places if place), ())

    def launch_by_triton(self, function: Function, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch what Triton finds the binary of, or interprets, by torch's operators among others; record it."""
        with _disable_current_modes():
            function(*tensors)
        self.attempt(self.called, function, tuple(tensors), {})

    def _add(
        self, instruction: Instruction, uses: Iterable[int], makes: Iterable[int], *, is_needed: bool = True
    ) -> None:
        self.steps.append(_Step(instruction, frozenset(uses), frozenset(makes), is_needed))


def _call(function: Function, args: Any, kwargs: Any, made: Sequence[tuple[int, int]]) -> Instruction:
    leaves, structure = tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, _Reference))
    references = sum(isinstance(leaf, _Reference) for leaf in leaves)
    is_flat = references == sum(isinstance(arg, _Reference) for arg in args)

    def call(slots: Slots, _: int) -> None:
        if is_flat:  # trees take longer than the operator
            result = function(*[arg.tensor(slots) if type(arg) is _Reference else arg for arg in args], **kwargs)
        else:
            tensors = [leaf.tensor(slots) if type(leaf) is _Reference else leaf for leaf in leaves]
            args_, kwargs_ = tree_unflatten(tensors, structure)
            result = function(*args_, **kwargs_)
        if made:
            results = [result] if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
            for number, slot in made:
                tensor = slots.tensors[slot] = results[number]
                slots.pointers[slot] = tensor.data_ptr()

    return call


def _launch(
    launch: Launch, programs: int, places: Sequence[tuple[int, int] | None], sizes: tuple[int, ...]
) -> Instruction:
    run, function, metadata, rest = launch
    values = (*sizes, *rest)
    read = operator.itemgetter(*[place[0] if place else -1 for place in places], -1)  # of one item it makes no tuple
    offsets = [place[1] if place else 0 for place in places]

    def start(slots: Slots, stream: int) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *read(slots.pointers)[:-1], *values)

    def start_inside(slots: Slots, stream: int) -> None:
        pairs = zip(offsets, read(slots.pointers), strict=False)
        pointers = [offset + pointer if offset else pointer for offset, pointer in pairs]
        run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *values)

    return start_inside if any(offsets) else start


def _clear(dead: Sequence[int], slots: Slots, _: int) -> None:
    for slot in dead:
        slots.tensors[slot] = None


class _Recording(NamedTuple):
    """A call that can be replayed."""

    instructions: tuple[Instruction, ...]
    blank: list[None]
    """The slots beside those of the arguments."""
    results: tuple[_Reference, ...]
    kind: type | None
    """Of several results; None for one tensor."""

    def replay(self, tensors: Sequence[torch.Tensor], pointers: Sequence[int]) -> Any:
        slots = Slots([*tensors, *self.blank], [*pointers, *self.blank, None])
        _set_allocator()
        stream = driver.active.get_current_stream(tensors[0].get_device()) if tensors[0].is_cuda else 0
        for instruction in self.instructions:
            instruction(slots, stream)
        results = [slots.tensors[result[0]] if result[1] is None else result.tensor(slots) for result in self.results]
        return results[0] if self.kind is None else self.kind(results)


def _recording(recorder: _Recorder, arguments: int, result: Any) -> _Recording | None:
    """Return the recording of a call; None where it cannot be replayed."""
    if recorder.failed:
        return None
    kind = None if isinstance(result, torch.Tensor) else type(result)
    try:
        results = tuple(recorder.reference(tensor) for tensor in ([result] if kind is None else result))
    except _UnrecordableError:
        return None
    used = {reference.slot for reference in results}
    instructions: list[Instruction] = []
    for step in reversed(recorder.steps):
        if not step.is_needed and not step.makes & used:
            continue
        if dead := (step.uses | step.makes) - used:
            instructions.append(functools.partial(_clear, sorted(dead)))
        instructions.append(step.instruction)
        used |= step.uses | step.makes
    count = max((slot + 1 for slot in used), default=0) - arguments
    return _Recording(tuple(reversed(instructions)), [None] * count, results, kind)


def _layout(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[torch.Tensor], list[int]]:
    """Return all that a function may depend on but the values of its tensors; its tensors; and their addresses."""
    layout: list[Any] = [arguments[0].device]
    tensors: list[torch.Tensor] = []
    pointers: list[int] = []
    for argument in arguments:
        if argument.__class__ in _PLAIN:
            layout.append(argument)
            continue
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if item.__class__ not in _PLAIN and isinstance(item, torch.Tensor):
                pointer = item.data_ptr()
                layout += item.shape, item.stride(), item.dtype, pointer & 15
                tensors.append(item)
                pointers.append(pointer)
            else:
                layout.append(item)
    return tuple(layout), tensors, pointers


def replayed(function: Function) -> Function:
    """Return a function of the same arguments and results, which replays.

    The first argument is a tensor; others are tensors, hashable, or lists and tuples of these. ``function`` returns a
    tensor, or a list or a tuple of tensors. It decides nothing by their values, and keeps nothing of a call.
    """
    recordings: dict[tuple[Any, ...], _Recording | None] = {}
    seen: set[tuple[Any, ...]] = set()
    caches.extend([recordings.clear, seen.clear])

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        if _recorders.current is not None or _is_hooked():
            return function(*arguments)
        layout, tensors, pointers = _layout(arguments)
        if recording := recordings.get(layout):
            return recording.replay(tensors, pointers)
        if layout in recordings:
            return function(*arguments)
        if layout in seen:
            _recorders.current = recorder = _Recorder(tensors)
            try:
                with recorder:
                    result = function(*arguments)
            finally:
                _recorders.current = None
            recordings[layout] = _recording(recorder, len(tensors), result)
            return result
        if len(seen) >= MOST_LAYOUTS:
            seen.clear()
            recordings.clear()
        seen.add(layout)
        return function(*arguments)

    return run
