"""What is known of a pick, in a word. Imports nothing: the command line completes these words."""

from __future__ import annotations

from enum import StrEnum


class PickVerdict(StrEnum):
    """What is known of a pick."""

    CERTIFIED = "certified"
    """Proven faster than every other finalist."""
    NEAR_TIE = "near-tie"
    """At most the keep band slower than the fastest: of those tied with it the default, else the first in order."""
    ONLY = "only"
    """The only finalist: nothing else was timed, or the screen left nothing near it. Nothing to compare it with."""
    AMBIGUOUS = "ambiguous"
    """It may lose more than the keep band: measured too little, or too noisy."""
    KEPT_INCUMBENT = "kept-incumbent"
    """The committed config: another is preferred, but not proven faster by more than the keep band."""
    UNRESOLVABLE = "unresolvable"
    """Too short for the timer to tell configs apart, or timed from a cache."""
    QUICK = "quick"
    """Screened only."""


class Kept(StrEnum):
    """Why a faster config is not the pick. Empty where none is faster."""

    NOTHING = ""
    TIED = "tied"
    """All within the tie band are equally fast: the first in canonical order is taken, the default before all."""
    DEFAULT = "default stays"
    """The declared default stays: none is proven to be faster."""
    COMMITTED = "committed stays"
    """The committed table's config stays: none is proven to be faster by more than the keep band."""
    TOO_SHORT = "too short"
    """Times are too short to tell configs apart: what was there stays."""


PUBLISHED = "published"
"""Stands for the verdict that rows of others have none of."""

WORDS = (*map(str, PickVerdict), PUBLISHED)
"""What ``show --verdict`` takes."""
