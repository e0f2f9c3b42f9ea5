"""What tells launches of a kernel apart, computed in about a microsecond: everything but the values of tensors.

For each way of calling a kernel (how many positional arguments, which keywords, which of them are tensors) a function
is generated that reads dtype, shape, layout and address of each tensor and the value of each other argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from fp8tune.record.tensors import is_descriptor, is_tensor

Signature = Callable[[Sequence[Any], Mapping[str, Any]], Hashable]

NO_PARAMETERS = ("grid", "warmup")


class WarmsUp(Exception):  # noqa: N818 - no error
    """The call compiles and launches nothing."""


class Signatures:
    """The signature functions of one kernel, by the way of calling it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._ignored: set[str] = set()
        self._variants: dict[Hashable, dict[Hashable, Signature]] = {}
        self.of: dict[Hashable, Signature] = {}
        """(number of positional arguments, names of keywords) -> signature function."""

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """The signature function of a call that has none, or whose arguments are of other kinds."""
        form, kinds = (len(args), *kwargs), _types(args, kwargs)
        variants = self._variants.setdefault(form, {})
        if kinds not in variants:
            variants[kinds] = _compiled(args, kwargs, self._names, self._ignored)
        distinct = set(map(_source, variants.values()))
        self.of[form] = variants[kinds] if len(distinct) == 1 else _by_types(variants)
        return variants[kinds]

    def ignore(self, names: Collection[str]) -> None:
        """No longer tell launches apart by these arguments."""
        self._ignored.update(names)
        self._variants.clear()
        self.of.clear()


def _types(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    return tuple(map(type, args)), tuple(map(type, kwargs.values()))


def _by_types(variants: Mapping[Hashable, Signature]) -> Signature:
    return lambda args, kwargs: variants[tuple(map(type, args)), tuple(map(type, kwargs.values()))](args, kwargs)


def _source(signature: Signature) -> str:
    return signature.__doc__ or ""


def _compiled(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], ignored: Collection[str]
) -> Signature:
    """The function for calls like this one."""
    lines, parts, addresses = [], [], []
    if args:
        lines.append(f"{', '.join(f'a{index}' for index in range(len(args)))}, = args")
    given = [(f"a{index}", names[index], value) for index, value in enumerate(args)]
    for index, (name, value) in enumerate(kwargs.items()):
        if name not in NO_PARAMETERS:
            lines.append(f"k{index} = kwargs[{name!r}]")
            given.append((f"k{index}", name, value))
    for variable, name, value in given:
        if is_descriptor(value):
            parts += [f"{variable}.base.dtype", f"tuple({variable}.shape)", f"tuple({variable}.strides)"]
            parts.append(f"tuple({variable}.block_shape)")
            addresses.append(f"{variable}.base.data_ptr()")
        elif is_tensor(value):
            parts += [f"{variable}.dtype", f"{variable}.shape", f"{variable}.is_contiguous() or {variable}.stride()"]
            addresses.append(f"{variable}.data_ptr()")
        elif name not in ignored:
            parts.append(variable)
    if addresses:
        lines.append(f"p = ({', '.join(addresses)},)")
        either = " | ".join(f"p[{index}]" for index in range(len(addresses)))
        # all aligned and all apart, as nearly always, or else how each is aligned and which begin at the same address
        parts.append(f"not ({either}) & 15 or tuple([x & -x & 15 for x in p])")
        parts.append(f"len({{*p}}) == {len(addresses)} or tuple(map(p.index, p))")
    body = "\n    ".join(
        ["if kwargs.get('warmup'): raise WarmsUp", *lines, f"return ({', '.join(parts)},)" if parts else "return ()"]
    )
    source = f"def signature(args, kwargs):\n    {body}\n"
    scope: dict[str, Any] = {"WarmsUp": WarmsUp}
    exec(source, scope)
    signature: Signature = scope["signature"]
    signature.__doc__ = source
    return signature
