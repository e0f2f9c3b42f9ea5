"""The launches of a recorded kernel as problems: sizes by name, and a layout that stands for all else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fp8tune.records import RECORDED, NamedInts, Problem
from fp8tune.replay.configs import is_size
from fp8tune.replay.recording import Kernel, Launch
from fp8tune.replay.values import dtype_number, number, text_of

ODD = "odd-"
"""Begins the layout of the same launch at sizes that no block divides."""


class Word(int):
    """A number in a shape that stands for a text, a dtype or a float; prints as that."""

    text: str

    def __new__(cls, number: int, text: str) -> Word:
        """Return the number with its text."""
        word = super().__new__(cls, number)
        word.text = text
        return word

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return Word, (int(self), self.text)


def in_words(problem: Problem, launch: Launch) -> Problem:
    """Return an equal problem whose sizes print as the arguments of its launch do: ``MODE=silu TO=float16``."""
    scalars, dtypes = launch.scalars, {f"{item.name}_dtype": item.dtype for item in launch.tensors}
    texts = {name: text_of(value) for name, value in scalars.items() if type(value) is not int} | dtypes
    numbers = {name: number(value) for name, value in scalars.items()}
    numbers |= {name: dtype_number(dtype) for name, dtype in dtypes.items()}
    words = [
        (name, Word(size, texts[name]) if name in texts and numbers[name] == size else size)
        for name, size in problem.shape.items()
    ]
    return replace(problem, shape=NamedInts(words))


def key(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of the lookup key: those of the autotuner's key, then the dtypes in which launches differ."""
    tensors = {argument.name for launch in kernel.launches for argument in launch.tensors}
    scalars = [launch.scalars for launch in kernel.launches]
    named = [name for name in kernel.key if name not in tensors and all(name in values for values in scalars)]
    return (*named, *(f"{name}_dtype" for name in _differing(kernel.launches)))


def problems(kernel: Kernel) -> dict[Problem, Launch]:
    """Return each launch under its problem, in the order of the recording."""
    differing = _differing(kernel.launches)
    return {problem(kernel, launch, differing, RECORDED): launch for launch in kernel.launches}


def problem(kernel: Kernel, launch: Launch, differing: Sequence[str], layout: str) -> Problem:
    """Return the problem of one launch; ``differing``: the tensors whose dtypes are sizes."""
    dtypes, scalars = {item.name: item.dtype for item in launch.tensors}, launch.scalars
    sizes = {name: number(scalars[name]) for name in kernel.key if name in scalars}
    sizes |= {f"{name}_dtype": dtype_number(dtypes[name]) for name in differing if name in dtypes}
    sizes |= {name: value for name, value in scalars.items() if is_size(name, value) and name not in sizes}
    if not sizes and launch.tensors:  # a kernel may take its sizes from nothing but the shapes of its grid
        first = launch.tensors[0]
        sizes = {f"{first.name}_{dim}": size for dim, size in enumerate(first.shape)}
    floats = [item.dtype for item in launch.tensors if not item.is_integer]
    return Problem(
        kernel.name,
        NamedInts({name.replace("[", "_").replace("]", ""): size for name, size in sizes.items()} or {"count": 1}),
        input_layout=f"{layout}{launch.id}",
        in_dtype=next(iter([*floats, *dtypes.values()]), ""),
        fp8_dtype="",
        scale_mode="",
    )


def _differing(launches: Sequence[Launch]) -> list[str]:
    """Return the tensors that have not the same dtype in all launches."""
    dtypes: dict[str, set[str]] = {}
    for argument in (argument for launch in launches for argument in launch.tensors):
        dtypes.setdefault(argument.name, set()).add(argument.dtype)
    return [name for name, several in dtypes.items() if len(several) > 1]
