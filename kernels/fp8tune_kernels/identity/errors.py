"""Reasons why code has no identity. Each text is one line."""

from __future__ import annotations


class UnknownCodeError(ValueError):
    """There is no source of such a kernel."""


class InvalidCodeError(UnknownCodeError):
    """The source of a kernel is not Python, or its name is none."""
