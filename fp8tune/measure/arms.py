"""What can be timed (an *arm*), what it does (its *work*), and where in an experiment it is timed (a *place*)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from fp8tune.measure import kept
from fp8tune.plan.problems import seed_text
from fp8tune.records import NamedInts, Problem
from fp8tune_kernels.spec import KernelSpec


@dataclass(frozen=True)
class Work:
    """What an arm does, as far as a clock that draws its times must know."""

    identity: str
    """The same text has the same true time."""
    bytes_moved: int
    config: str = ""
    """Kernel and config alone."""
    key: str = ""
    """Kernel and lookup key: with the config, all that a winner depends on. Empty: the identity stands for both."""


@dataclass(frozen=True)
class Place:
    """Where in an experiment a block is timed. A clock that draws its times needs it."""

    process: int = 0
    """Number of the worker process: the same whenever the experiment is run again; no process id."""
    round: int = 0
    position: int = 0
    """The block's place in its round: with the round, the time on the process's wall clock."""
    after: str = ""
    """Identity of the work timed just before, which leaves something behind; empty for none."""
    duplicate: bool = False
    clock: int | None = None
    """Processes that take turns on one device have the same number, and so one wall clock. None: a clock of its own."""


@dataclass(frozen=True, kw_only=True)
class Arm(ABC):
    """One thing that is timed. Frozen and picklable: its methods run in a worker."""

    seat: int = 0
    """Which of the schedule's workers launches it."""
    duplicate: bool = False
    """The same under a second name: the A/A control."""
    long_us: ClassVar[float | None] = None
    """A block of a launch that takes longer is four flushed launches: :func:`fp8tune.measure.timing.block`."""

    @property
    @abstractmethod
    def work(self) -> Work:
        """What a clock that draws its times must know."""

    def build(self, torch_device: str) -> None:  # noqa: B027 - an arm may share nothing
        """Build the tensors that the arms of its group share. What it raises ends the group."""

    @abstractmethod
    def launcher(self, torch_device: str) -> Callable[[], object]:
        """What enqueues the work once. What it raises, or its first call, is this arm's own failure."""


@dataclass(frozen=True)
class KernelArm(Arm):
    """One config of a kernel on one problem."""

    reference: str
    """How workers load the spec: a kernel's name, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``."""
    problem: Problem
    config: NamedInts
    key: NamedInts = field(default_factory=NamedInts)
    """The lookup key of the problem."""
    bytes_moved: int = 0
    flops: int | None = None
    """Floating-point operations, where the kernel declares them."""

    @classmethod
    def of(cls, reference: str, spec: KernelSpec, problem: Problem, config: NamedInts) -> KernelArm:
        """With what the spec says of the problem."""
        return cls(reference, problem, config, spec.lookup_key(problem), spec.bytes_of(problem))

    @cached_property  # it is asked for at each block
    def work(self) -> Work:
        """By kernel, problem and config."""
        kernel, config = self.problem.kernel, self.config.canonical
        return Work(
            identity=f"{seed_text(self.problem)} {config}",
            bytes_moved=self.bytes_moved,
            config=f"{kernel} {config}",
            key=f"{kernel} {self.key.canonical}",
        )

    def build(self, torch_device: str) -> None:
        """The problem's tensors, without a reference."""
        kept.unchecked_tensors(self.reference, self.problem, torch_device)

    def launcher(self, torch_device: str) -> Callable[[], object]:
        """Launches the config; its bytes are not looked at."""
        return kept.unchecked_tensors(self.reference, self.problem, torch_device).launcher(self.config)
