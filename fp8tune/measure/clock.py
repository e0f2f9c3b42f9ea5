"""What a clock is asked and what it answers: a :class:`Trial` goes in, a :class:`Block` of samples comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Block:
    """Samples of one block in microseconds, and the timer's tick as far as they show it."""

    samples_us: tuple[float, ...]
    tick_us: float | None
    thrown_away: int = 0
    """Blocks of the same launch that scattered more (:mod:`fp8tune.measure.steady`)."""


@dataclass(frozen=True)
class Trial:
    """What is timed, as far as a clock that draws its times needs to know."""

    identity: str
    """Names problem and config: the same text has the same true time."""
    round: int
    bytes_moved: int
    hopeless_us: float | None = None
    """A config slower than this cannot be the pick, and is not worth a whole block."""
    process: int = 0
    """Which worker of the sweep times it: an index, the same whenever the sweep is run again; no process id."""
    position: int = 0
    """The block's place in its round: with the round, the clock's wall time."""
    after: str = ""
    """Identity of the trial timed just before, which leaves something behind; empty for none."""
    clock: int | None = None
    """Processes that take turns on one device have the same number, and so one wall clock. None: a clock of its own."""
    config: str = ""
    """The config alone."""
    key: str = ""
    """Kernel and lookup key: with the config, all that a winner depends on. Empty: the identity stands for both."""
    duplicate: bool = False
    """The config under a second name, timed once more in the same round."""


@dataclass(frozen=True)
class Slot:
    """Where a trial stands in the finals; the fields are those of :class:`Trial`."""

    process: int
    round: int
    position: int = 0
    after: str = ""
    duplicate: bool = False
    clock: int | None = None


class Timer(Protocol):
    """Anything that can time a launch."""

    runs_kernels: bool
    """False where no kernel needs to be built or checked, because none runs."""

    def block(self, launch: Callable[[], object], trial: Trial) -> Block | None:
        """Time ``launch``; None where this clock does not time."""
        ...
