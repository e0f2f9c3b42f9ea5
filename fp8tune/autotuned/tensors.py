"""The tensors of a recorded launch, made anew: the same forms, storages and alignment; values as they were described.

Inputs are what the kernel reads, with the first contents of what it both reads and writes; outputs are what it writes.
Arguments that share memory are views of one input or output. A tensor with one value throughout is an input of
integers with the same bits, as no other contents are to be written into it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fp8tune.autotuned.problems import tensors_of
from fp8tune.autotuned.values import decoded
from fp8tune.recording import Launch, Tensor


@dataclass(frozen=True)
class Storage:
    """Memory of a launch, with the arguments in it."""

    arguments: tuple[Tensor, ...]
    is_written: bool
    is_kept: bool
    """Whether its first contents count: it is read, only in part an argument, or nobody knows."""

    @cached_property
    def dtype(self) -> str:
        """``uint8`` where the arguments disagree."""
        dtypes = {argument.dtype for argument in self.arguments}
        return dtypes.pop() if len(dtypes) == 1 else "uint8"

    @cached_property
    def is_flat(self) -> bool:
        """Whether the memory is one row of elements that the arguments are views of."""
        return not _are_alike(self.arguments)

    @property
    def is_constant(self) -> bool:
        """Whether it has one value throughout, which is no input for a check of contents."""
        return all(_constant(each) is not None for each in self.arguments)

    @property
    def name(self) -> str:
        """The arguments' names."""
        return " and ".join(argument.name for argument in self.arguments)

    def itemsize(self, argument: Tensor) -> int:
        """Bytes of an element of an argument."""
        return _itemsize(argument.dtype)

    def empty(self, device: str) -> Any:
        """The memory, uninitialised."""
        import torch

        dtype = _torch_dtype(self.dtype)
        size = max(_bytes_end(argument) for argument in self.arguments)
        lead = _lead(min(self.arguments, key=lambda each: each.offset * _itemsize(each.dtype)))
        lead = -(-lead // dtype.itemsize)
        if self.dtype == "uint8" and self.is_flat:
            size = -(-size // 16) * 16  # any dtype can view it
        flat = torch.empty(lead + -(-size // dtype.itemsize), dtype=dtype, device=device)
        if self.is_flat:
            return flat[lead:]
        first = self.arguments[0]
        return flat.as_strided(first.shape, first.strides, lead + first.offset)

    def view(self, memory: Any, argument: Tensor) -> Any:
        """The memory as an argument."""
        dtype = _torch_dtype(argument.dtype)
        if not self.is_flat:
            return memory.view(dtype)
        typed = memory.view(dtype)
        return typed.as_strided(argument.shape, argument.strides, typed.storage_offset() + argument.offset)

    def made(self, device: str, seed: int, launch_id: str, is_exact: bool) -> Any:
        """The memory with contents; ``is_exact``: constants are powers of two, so that sums with them are exact."""
        import torch

        memory = self.empty(device)
        if device != "meta":
            if self.is_flat:
                _bits(memory).zero_()
            for argument in self.arguments[: None if self.is_flat else 1]:
                text = f"{seed} {launch_id} {argument.name}"
                generator = torch.Generator(device).manual_seed(zlib.crc32(text.encode()))
                _fill(self.view(memory, argument), _rounded(argument) if is_exact else argument, generator)
        return _bits(memory) if self.is_constant and not self.is_flat else memory


@dataclass(eq=False)
class Case:
    """One launch with the plan of its memory. The last of a spec's inputs, so that all else finds it there."""

    launch: Launch
    device: str
    zeroed: frozenset[str]
    """``reset_to_zero``: the caller hands these over as zeros."""
    restored: frozenset[str]
    is_exact: bool = False
    """Whether values are to have exact sums: ``check="exact-inputs"``."""
    untouched: dict[int, Any] = field(default_factory=dict)
    """Output -> the elements that the config declared first leaves as they are: none of any other config's either."""
    _named: tuple[Any, ...] = ()

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """In the order of the arguments."""
        groups: dict[int, list[Tensor]] = {}
        for argument in tensors_of(self.launch):
            groups.setdefault(argument.storage, []).append(argument)
        return tuple(self._storage(group) for group in groups.values())

    def _storage(self, group: Sequence[Tensor]) -> Storage:
        names = {argument.name for argument in group}
        marked = names & (self.zeroed | self.restored)
        is_written = any(argument.is_stored is not False for argument in group) or bool(marked)
        is_read = any(argument.is_loaded is not False for argument in group) or bool(names & self.restored)
        is_kept = (is_read or not _are_alike(group)) and not names <= self.zeroed
        return Storage(tuple(group), is_written, is_kept)

    @property
    def written(self) -> list[Storage]:
        """Those of the outputs."""
        return [storage for storage in self.storages if storage.is_written]

    @property
    def kept(self) -> list[Storage]:
        """Those of the inputs."""
        return [storage for storage in self.storages if storage.is_kept or not storage.is_written]

    def inputs(self, seed: int) -> tuple[Any, ...]:
        """The inputs of the spec: tensors, then this."""
        return (*(storage.made(self.device, seed, self.launch.id, self.is_exact) for storage in self.kept), self)

    def outputs(self) -> tuple[Any, ...]:
        """The outputs, uninitialised."""
        return tuple(storage.empty(self.device) for storage in self.written)

    def prepare(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Put back what a launch reads in its outputs."""
        given = dict(zip(map(id, self.kept), inputs, strict=False))
        for index, (storage, output) in enumerate(zip(self.written, outputs, strict=True)):
            if id(storage) in given:
                _bits(output).copy_(_bits(given[id(storage)]))
            for argument in storage.arguments:
                if argument.name in self.zeroed:
                    _bits(storage.view(output, argument)).zero_()
            if index in self.untouched:
                _bits(output).masked_fill_(self.untouched[index], 0)

    def tensors(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> dict[str, Any]:
        """Each tensor argument by name, as the kernel gets it."""
        memory = dict(zip(map(id, self.kept), inputs, strict=False))
        memory |= zip(map(id, self.written), outputs, strict=True)
        return {
            argument.name: storage.view(memory[id(storage)], argument)
            for storage in self.storages
            for argument in storage.arguments
        }

    def arguments(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> dict[str, Any]:
        """Every argument by name. Made once for the same tensors, as a launch is to cost the host little."""
        if not self._named or self._named[0] is not inputs or self._named[1] is not outputs:
            tensors = self.tensors(inputs, outputs)
            named = {
                each.name: _described(each, tensors[each.name]) if isinstance(each, Tensor) else decoded(each.value)
                for each in self.launch.arguments
            }
            self._named = (inputs, outputs, named)
        return dict(self._named[2])


def _rounded(argument: Tensor) -> Tensor:
    """A constant at the next smaller power of two."""
    value = _constant(argument)
    if not value or not math.isfinite(value):
        return argument
    rounded = math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)
    return replace(argument, least=rounded, most=rounded, constant=rounded)


def _described(argument: Tensor, tensor: Any) -> Any:
    """A tensor, or the TensorDescriptor over it that was recorded."""
    if argument.descriptor is None:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(argument.shape), list(argument.strides), list(argument.descriptor))


def _fill(tensor: Any, described: Tensor, generator: Any) -> None:
    """Write values of the recorded distribution into a tensor of any strides."""
    import torch

    if not tensor.numel():
        return
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if tensor.dtype.is_floating_point:
        made = _floats(tensor, described, generator)
    else:
        made = _integers(tensor, described, generator)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        tensor, made = tensor[first], made[first]
    tensor.copy_(made)


def _constant(described: Tensor) -> float | None:
    """The value of all elements; None where they differ or nothing is known.

    Infinity where none is finite and older recordings have no sign for it: what a minimum begins with.
    """
    if described.constant is not None:
        return float(decoded(described.constant))
    if described.not_finite == 1.0:
        return math.inf
    return described.least if described.least == described.most and not described.not_finite else None


def _floats(tensor: Any, described: Tensor, generator: Any) -> Any:
    """Normal with the recorded mean and deviation within the recorded range; standard normal where nothing is known."""
    import torch

    dtype = tensor.dtype if tensor.element_size() > 1 else torch.float32  # float8 knows no arithmetic
    made = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    if (constant := _constant(described)) is not None:
        return made.fill_(constant)
    if described.least is None or described.most is None:
        return made.normal_(generator=generator)
    made.normal_(described.mean or 0.0, max(described.deviation or 0.0, 1e-30), generator=generator)
    made.clamp_(described.least, described.most)
    if described.zeros:
        made[torch.rand(made.shape, device=made.device, generator=generator) < described.zeros] = 0
    if made.numel() > 1 and bool((made == made.view(-1)[0]).all()):  # few elements, or nearly all of them zeros
        made.view(-1)[0] = described.least if made.view(-1)[0] == described.most else described.most
    return made


def _integers(tensor: Any, described: Tensor, generator: Any) -> Any:
    """The recorded values, else numbers of the recorded range; zeros where nothing is known."""
    import torch

    if described.values is not None:
        return torch.tensor(described.values, dtype=torch.int64).view(tensor.shape).to(tensor.dtype).to(tensor.device)
    least, most = int(described.least or 0), int(described.most or 0)
    made = torch.randint(least, most + 1, tensor.shape, device=tensor.device, generator=generator)
    if described.is_sorted:
        made = made.flatten().sort().values
        made[0], made[-1] = least, most
        made = made.view(tensor.shape)
    return made.to(tensor.dtype)


def _are_alike(arguments: Sequence[Tensor]) -> bool:
    return len({(each.dtype, each.shape, each.strides, each.offset) for each in arguments}) == 1


def _bytes_end(argument: Tensor) -> int:
    """Bytes from the start of the storage to the end of an argument."""
    if math.prod(argument.shape) == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.strides, strict=True))
    return (argument.offset + last + 1) * _itemsize(argument.dtype)


def _lead(argument: Tensor) -> int:
    """Bytes before it, so that its address is aligned as it was and no better."""
    return argument.alignment if _itemsize(argument.dtype) <= argument.alignment < 16 else 0


def _itemsize(dtype: str) -> int:
    return int(_torch_dtype(dtype).itemsize)


def _torch_dtype(name: str) -> Any:
    return decoded({"dtype": f"torch.{name}"})


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
