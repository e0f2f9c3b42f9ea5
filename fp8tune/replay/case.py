"""Tensors of recorded launches, made anew: the same forms, storages and alignment; values as they were described.

Inputs are what the kernel reads, with the first contents of what it both reads and writes; outputs are what it writes.
Arguments that share memory are views of one input or output. A tensor with one value throughout is an input of
integers with the same bits, as no other contents are to be written into it.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fp8tune.replay.lazy import torch
from fp8tune.replay.recording import Launch, Tensor
from fp8tune.replay.values import arguments_of, decoded


@dataclass(frozen=True)
class Storage:
    """Memory of a launch, with the arguments in it."""

    launch: Launch
    arguments: tuple[Tensor, ...]
    is_written: bool
    is_input: bool  # True if its first contents count: it is read, only in part an argument, or nobody knows

    @cached_property
    def dtype(self) -> Any:
        """Torch's; ``uint8`` where the arguments disagree."""
        dtypes = {argument.dtype for argument in self.arguments}
        return torch_dtype(dtypes.pop() if len(dtypes) == 1 else "uint8")

    @cached_property
    def is_flat(self) -> bool:
        """True if the arguments are views of one row of elements."""
        return len({(item.dtype, item.shape, item.strides, item.offset) for item in self.arguments}) > 1

    @property
    def name(self) -> str:
        """Names of the arguments."""
        return " and ".join(argument.name for argument in self.arguments)

    def empty(self, device: str) -> Any:
        """Allocate the memory, uninitialised."""
        first = min(self.arguments, key=lambda item: item.offset * itemsize(item))
        # its address is to be aligned as it was and no better
        lead_bytes = first.alignment if itemsize(first) <= first.alignment < 16 else 0
        lead, size = -(-lead_bytes // self.dtype.itemsize), max(map(_bytes_end, self.arguments))
        if self.dtype == torch.uint8 and self.is_flat:
            size = -(-size // 16) * 16  # any dtype can view it
        row = torch.empty(lead + -(-size // self.dtype.itemsize), dtype=self.dtype, device=device)
        return row[lead:] if self.is_flat else row.as_strided(first.shape, first.strides, lead + first.offset)

    def view(self, memory: Any, argument: Tensor) -> Any:
        """Return the memory as an argument."""
        typed = memory.view(torch_dtype(argument.dtype))
        if not self.is_flat:
            return typed
        return typed.as_strided(argument.shape, argument.strides, typed.storage_offset() + argument.offset)

    def filled(self, device: str, seed: int, is_exact: bool) -> Any:
        """Return the memory with contents; ``is_exact``: constants are powers of two, whose sums are exact."""
        memory = self.empty(device)
        if device != "meta":
            if self.is_flat:
                bits(memory).zero_()
            for argument in self.arguments if self.is_flat else self.arguments[:1]:
                name = f"{seed} {self.launch.id} {argument.name}"
                generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
                _fill(self.view(memory, argument), argument, generator, is_exact)
        is_constant = all(_constant(item) is not None for item in self.arguments)
        return bits(memory) if is_constant and not self.is_flat else memory


@dataclass(eq=False)
class Case:
    """A launch, or those that share a config, and the plan of its memory. The last of a spec's inputs."""

    launches: tuple[Launch, ...]
    device: str
    zeroed: frozenset[str] = frozenset()  # `reset_to_zero`: the caller hands these over as zeros
    restored: frozenset[str] = frozenset()
    is_exact: bool = False  # True if sums of values are to be exact: check="exact-inputs"
    untouched: dict[int, Any] = field(default_factory=dict)
    """Output -> the elements that the config declared first leaves as they are: no other config may write them."""
    _named: tuple[Any, ...] = (None, None)

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """Memory of the launches, in the order of the arguments."""
        result: list[Storage] = []
        for launch in self.launches:
            groups: dict[int, list[Tensor]] = {}
            for argument in launch.tensors:
                groups.setdefault(argument.storage, []).append(argument)
            for group in groups.values():
                names = {argument.name for argument in group}
                is_written = any(item.is_stored is not False for item in group) or names & (self.zeroed | self.restored)
                is_read = any(item.is_loaded is not False for item in group) or names & self.restored
                storage = Storage(launch, tuple(group), bool(is_written), not is_written)
                is_input = (is_read or storage.is_flat) and not names <= self.zeroed
                result.append(Storage(launch, tuple(group), bool(is_written), bool(is_input or not is_written)))
        return tuple(result)

    @property
    def written(self) -> list[Storage]:
        """Storages of the outputs."""
        return [storage for storage in self.storages if storage.is_written]

    @property
    def _read(self) -> list[Storage]:
        return [storage for storage in self.storages if storage.is_input]

    def inputs(self, seed: int) -> tuple[Any, ...]:
        """Return the inputs of the spec: tensors, then this."""
        return (*(storage.filled(self.device, seed, self.is_exact) for storage in self._read), self)

    def integers(self, launch: Launch) -> dict[str, Any]:
        """Return the integer tensors that a launch only reads, by argument and on the CPU."""
        storages = [storage for storage in self.storages if storage.launch is launch and not storage.is_written]
        integers = [storage for storage in storages if all(item.is_integer for item in storage.arguments)]
        filled = [(storage, storage.filled("cpu", 0, self.is_exact)) for storage in integers]
        return {item.name: storage.view(memory, item) for storage, memory in filled for item in storage.arguments}

    def outputs(self) -> tuple[Any, ...]:
        """Return the outputs, uninitialised."""
        return tuple(storage.empty(self.device) for storage in self.written)

    def prepare(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Put back what a launch reads in its outputs."""
        contents = dict(zip(map(id, self._read), inputs, strict=False))
        for index, (storage, output) in enumerate(zip(self.written, outputs, strict=True)):
            if id(storage) in contents:
                bits(output).copy_(bits(contents[id(storage)]))
            for argument in storage.arguments:
                if argument.name in self.zeroed:
                    bits(storage.view(output, argument)).zero_()
            if index in self.untouched:
                bits(output).masked_fill_(self.untouched[index], 0)

    def arguments(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> list[dict[str, Any]]:
        """Return the arguments of each launch by parameter; made once for the same tensors: the host is to be quick."""
        if self._named[0] is not inputs or self._named[1] is not outputs:
            memory = dict(zip(map(id, self._read), inputs, strict=False))
            memory |= zip(map(id, self.written), outputs, strict=True)
            tensors: dict[str, dict[str, Any]] = {launch.id: {} for launch in self.launches}
            for storage in self.storages:
                views = {item.name: storage.view(memory[id(storage)], item) for item in storage.arguments}
                tensors[storage.launch.id] |= views
            self._named = inputs, outputs, [arguments_of(launch, tensors[launch.id]) for launch in self.launches]
        return list(map(dict, self._named[2]))

    def bytes_moved(self) -> int:
        """Return the bytes that are loaded and stored, each element of an argument once; both count twice."""
        total = 0
        for item in (tensor for launch in self.launches for tensor in launch.tensors):
            own = [size for size, stride in zip(item.shape, item.strides, strict=True) if stride]
            total += math.prod(own) * itemsize(item) * ((item.is_loaded is not False) + (item.is_stored is True))
        return total


def bits(tensor: Any) -> Any:
    """Return a tensor's bits as integers of the same size, in its memory and with its strides."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def torch_dtype(name: str) -> Any:
    """Return the dtype of this name."""
    return decoded({"dtype": f"torch.{name}"})


def itemsize(argument: Tensor) -> int:
    """Return the bytes of an element."""
    return int(torch_dtype(argument.dtype).itemsize)


def _bytes_end(argument: Tensor) -> int:
    """Return the bytes from the start of the storage to the end of an argument."""
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.strides, strict=True))
    return (argument.offset + last + 1) * itemsize(argument) if math.prod(argument.shape) else 0


def _constant(described: Tensor) -> float | None:
    """Return the value of all elements; None where they differ or nothing is known."""
    if described.constant is not None:
        return float(decoded(described.constant))
    return described.least if described.least == described.most and not described.not_finite else None


def _fill(tensor: Any, described: Tensor, generator: Any, is_exact: bool) -> None:
    """Write values of the recorded distribution into a tensor of any strides."""
    if not tensor.numel():
        return
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.is_floating_point:
        values = _floats(tensor, described, generator, is_exact)
    else:
        values = _integers(tensor, described, generator)
    expanded = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[expanded].copy_(values[expanded])


def _floats(tensor: Any, described: Tensor, generator: Any, is_exact: bool) -> Any:
    """Draw normal values with the recorded mean, deviation and range; standard normal where nothing is known."""
    dtype = tensor.dtype if tensor.element_size() > 1 else torch.float32  # float8 has no arithmetic
    values = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    if (constant := _constant(described)) is not None:
        if is_exact and constant and math.isfinite(constant):
            constant = math.copysign(2.0 ** math.floor(math.log2(abs(constant))), constant)
        return values.fill_(constant)
    if described.least is None or described.most is None:
        return values.normal_(generator=generator)
    values.normal_(described.mean or 0.0, max(described.deviation or 0.0, 1e-30), generator=generator)
    values.clamp_(described.least, described.most)
    if described.zeros:
        values[torch.rand(values.shape, device=values.device, generator=generator) < described.zeros] = 0
    first = values.view(-1)[0]
    if values.numel() > 1 and bool((values == first).all()):  # few elements, or nearly all of them zeros
        first.fill_(described.least if first == described.most else described.most)
    return values


def _integers(tensor: Any, described: Tensor, generator: Any) -> Any:
    """Return the recorded elements, else numbers of the recorded range; zeros where nothing is known."""
    if (integers := described.integers) is not None:
        return torch.tensor(integers, dtype=torch.int64).view(tensor.shape).to(tensor.dtype).to(tensor.device)
    least, most = int(described.least or 0), int(described.most or 0)
    values = torch.randint(least, most + 1, tensor.shape, device=tensor.device, generator=generator)
    if described.is_sorted:
        values = values.flatten().sort().values
        values[0], values[-1] = least, most
    return values.view(tensor.shape).to(tensor.dtype)
