"""Errors of pinning, each one line."""

from __future__ import annotations


class PinError(ValueError):
    """A table or kernel that cannot be pinned, or a key that the table lacks; the text is one line."""

    __module__ = __package__  # the name under which it is imported, for tracebacks


def one_line(error: BaseException, longest: int = 300) -> str:
    """Return an exception's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or type(error).__name__}"[:longest]
