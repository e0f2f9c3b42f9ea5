"""Tell launches of a kernel apart by everything but the values of tensors, in a few microseconds."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from fp8tune.replay.arguments import is_descriptor, is_tensor

NO_PARAMETERS = ("grid", "warmup")

_SCALARS = frozenset({int, bool, float, str, type(None)})
"""Types of most arguments, which are told apart by value."""


class WarmsUp(Exception):  # noqa: N818 - no error
    """The call compiles and launches nothing."""


def signature_of(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], ignored: Collection[str] = ()
) -> Hashable:
    """Return what tells a call from others: names, scalars, and the layout, alignment and overlap of its tensors.

    ``names``: the kernel's parameters; ``ignored``: scalars that do not count. Raises WarmsUp.
    """
    if kwargs.get("warmup"):
        raise WarmsUp
    parts: list[Hashable] = []
    addresses: list[int] = []
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if type(value) in _SCALARS:
            if name not in ignored and name != "warmup":
                parts += name, value
        elif is_tensor(value):
            parts += name, value.dtype, value.shape, value.is_contiguous() or value.stride()
            addresses.append(value.data_ptr())
        elif is_descriptor(value):
            base = value.base
            parts += name, base.dtype, tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
            addresses.append(base.data_ptr())
        elif name != "grid":
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
