"""Hashes of kernels that users name. :mod:`fp8tune_kernels.identity` computes them; nothing is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8tune import errors
from fp8tune.revisions.reference import KernelReference, place
from fp8tune_kernels import identity

SOURCE_ROOTS = ("kernels", "src", "")  # folders where a repository keeps its packages


class NoSuchKernel(errors.UsageError):
    """The code declares no such kernel."""


def source_roots(checkout: Path) -> list[Path]:
    """Return the folders of a checkout where imports may start."""
    return [checkout / root for root in SOURCE_ROOTS]


def source_hash(kernel: str, roots: Sequence[Path] = ()) -> str:
    """Return 16 hex digits for the code on the timed path of a kernel, as it is installed or in a checkout's ``roots``.

    Raises NoSuchKernel if the module or attribute does not exist, UsageError if a file does not parse.
    """
    with _one_line():
        return identity.code_hash(place(kernel), roots=roots)


def reference_hash(kernel: str) -> str:
    """Return 16 hex digits for the code that decides which bytes are right: another reference needs new checks.

    Configs of a kernel without a spec are compared with the first of them, so that its own code counts.
    """
    with _one_line():
        fields = ("inputs", "arguments", "reference", "edges")
        parts = [identity.fields_hash(place(kernel), fields, required="reference")]
    named = KernelReference.parse(kernel)
    if options := str(replace(named, kernel="", recording="")):
        functions = [source_hash(function) for function in (named.reference, named.inputs) if function]
        return identity.digest("\n".join([*parts, options, *functions]).encode())
    return parts[0]


def declaration_hash(kernel: str, roots: Sequence[Path] = ()) -> str:
    """Return 16 hex digits for all that a kernel's declaration mentions: with its code its configs, key and hooks.

    Raises as :func:`source_hash` does.
    """
    with _one_line():
        return identity.fields_hash(place(kernel), roots=roots)


def kernel_name(kernel: str, roots: Sequence[Path] = ()) -> str:
    """Return the ``name=`` that a referenced spec declares; a kernel without a spec has the name of its reference.

    Raises as :func:`source_hash` does.
    """
    with _one_line():
        name = identity.declared_name(place(kernel), roots)
    if name is None:
        return KernelReference.parse(kernel).kernel
    if not name:
        raise errors.UsageError(f'{kernel} has no literal name: declare it as SPEC = KernelSpec(name="...")')
    return name


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except identity.InvalidCodeError as error:
        raise errors.UsageError(str(error)) from None
    except identity.UnknownCodeError as error:
        raise NoSuchKernel(str(error)) from None
