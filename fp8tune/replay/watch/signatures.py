"""Tell launches of a kernel apart in about a microsecond, by everything but the values of tensors.

For each way of calling a kernel (number of positional arguments, keywords, which of them are tensors) a function is
generated that reads dtype, shape, layout and address of each tensor and the value of each other argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from fp8tune.replay.watch.memory import is_descriptor, is_tensor

Signature = Callable[[Sequence[Any], Mapping[str, Any]], Hashable]

NO_PARAMETERS = ("grid", "warmup")


class WarmsUp(Exception):  # noqa: N818 - no error
    """The call compiles and launches nothing."""


class Signatures:
    """The signature functions of one kernel, by the way of calling it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._ignored: set[str] = set()
        self._variants: dict[Hashable, Signature] = {}
        self.of: Signature = _unknown
        """The signature function for all calls so far; raises for a call of another kind."""

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """Return the signature function of a call that may have none yet."""
        kinds = _kinds(args, kwargs)
        if kinds not in self._variants:
            self._variants[kinds] = _compiled(args, kwargs, self._names, self._ignored)
        texts = {signature.__doc__ for signature in self._variants.values()}
        self.of = self._variants[kinds] if len(texts) == 1 else _by_kinds(self._variants)
        return self._variants[kinds]

    def refuse(self, args: Sequence[Any], kwargs: Mapping[str, Any], signature: Hashable) -> None:
        """Give calls like this one all the same signature."""
        self._variants[_kinds(args, kwargs)] = lambda args, kwargs: signature
        self.of = _by_kinds(self._variants)

    def ignore(self, names: Collection[str]) -> None:
        """Stop telling launches apart by these arguments."""
        self._ignored.update(names)
        self._variants.clear()
        self.of = _unknown


def _unknown(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    raise KeyError


def _kinds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    return (*map(type, args), *kwargs, *map(type, kwargs.values()))


def _by_kinds(variants: Mapping[Hashable, Signature]) -> Signature:
    return lambda args, kwargs: variants[_kinds(args, kwargs)](args, kwargs)


def _form(value: Any) -> Hashable:
    """Return the signature of a tuple, which may hold tensors."""
    if type(value) is tuple:
        return tuple(map(_form, value))
    if is_tensor(value):
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15
    return value  # type: ignore[no-any-return]


def _compiled(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], ignored: Collection[str]
) -> Signature:
    """Generate the function for calls like this one."""
    lines = ["if kwargs['warmup']: raise WarmsUp", f"if len(kwargs) != {len(kwargs)}: raise KeyError"]
    lines.append(f"{', '.join(f'a{index}' for index in range(len(args)))}, = args" if args else "() = args")
    given = [(f"a{index}", names[index], value) for index, value in enumerate(args)]
    for index, (name, value) in enumerate(kwargs.items()):
        if name not in NO_PARAMETERS:
            lines.append(f"k{index} = kwargs[{name!r}]")
            given.append((f"k{index}", name, value))
    parts: list[str] = []
    addresses: list[str] = []
    for variable, name, value in given:
        if is_descriptor(value):
            parts += [f"{variable}.base.dtype", f"tuple({variable}.shape)", f"tuple({variable}.strides)"]
            parts.append(f"tuple({variable}.block_shape)")
            lines.append(f"p{len(addresses)} = {variable}.base.data_ptr()")
        elif is_tensor(value):
            parts += [f"{variable}.dtype", f"{variable}.shape", f"{variable}.is_contiguous() or {variable}.stride()"]
            lines.append(f"p{len(addresses)} = {variable}.data_ptr()")
        else:
            if name not in ignored:
                parts.append(f"form({variable})" if type(value) is tuple else variable)
            continue
        addresses.append(f"p{len(addresses)}")
    every = ", ".join(addresses)
    if addresses:  # all aligned and all apart, as nearly always, or how each is aligned and which begin together
        parts.append(f"({' | '.join(addresses)}) & 15 and tuple([x & -x & 15 for x in ({every},)])")
    if len(addresses) > 1:
        parts.append(f"len({{{every}}}) == {len(addresses)} or tuple(map(({every},).index, ({every},)))")
    body = "\n    ".join([*lines, f"return ({', '.join(parts)},)" if parts else "return ()"])
    source = f"def signature(args, kwargs):\n    {body}\n"
    scope: dict[str, Any] = {"WarmsUp": WarmsUp, "form": _form}
    exec(source, scope)
    signature: Signature = scope["signature"]
    signature.__doc__ = source
    return signature
