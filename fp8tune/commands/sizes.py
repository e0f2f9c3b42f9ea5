"""Sizes of a problem as one types them."""

from __future__ import annotations

from fp8tune.errors import UsageError
from fp8tune.records import NamedInts


def sizes(text: str) -> NamedInts:
    """``M=16640,K=1408`` or ``M=16640 K=1408`` by name. Raises UsageError."""
    from fp8tune.store.texts import parse_named_ints

    try:
        found = parse_named_ints(" ".join(text.replace(",", " ").split()))
    except ValueError as error:
        raise UsageError(f"{text!r:.80} is no shape, {error}: write it as M=16640,K=1408") from None
    if not found:
        raise UsageError(f"{text!r:.80} names no size: write it as M=16640,K=1408")
    return found
