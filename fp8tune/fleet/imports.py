"""The code that a worker may import for a queued sweep: kernels of fp8tune, and what its own command line names."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8tune.errors import UsageError
from fp8tune.replay.loading import check_reference, recorded_kernel
from fp8tune.revisions.reference import KernelReference


@dataclass(frozen=True)
class Imports:
    """Foreign code that a command line names. A database may name any file, so its names alone are never imported."""

    kernels: frozenset[str] = frozenset()
    recordings: frozenset[str] = frozenset()
    """Absolute paths. All kernels of a recording may be imported."""
    references: frozenset[str] = frozenset()
    """Each ``module:function``."""

    @classmethod
    def named(
        cls, kernels: Iterable[str] = (), recordings: Iterable[str] = (), references: Iterable[str] = ()
    ) -> Imports:
        """Collect what options name; a kernel's text may name its recording and its reference too."""
        parsed = [KernelReference.parse(text).absolute_paths() for text in kernels]
        return cls(
            frozenset(_absolute(each.kernel) for each in parsed),
            frozenset({*(str(Path(path).absolute()) for path in recordings), *(each.recording for each in parsed)}),
            frozenset(
                map(_absolute, {*references, *(name for each in parsed for name in (each.reference, each.inputs))})
            ),
        )

    def check(self, kernels: Collection[str]) -> None:
        """Raise UsageError, naming the options to add, if a queued kernel is neither fp8tune's nor named here."""
        if options := self.options_for(kernels):
            raise UsageError(f"only the database names some code: if you trust it, add{options[:200]}")

    def options_for(self, kernels: Collection[str]) -> str:
        """The options of a worker, each after a blank, that would name what is not named here.

        Raises UsageError for a kernel that fp8tune does not have.
        """
        for text in kernels:
            check_reference(text)
        missing = dict.fromkeys(one for text in kernels for one in self._missing(KernelReference.parse(text)))
        return "".join(f" {option} {shlex.quote(value)}" for option, value in missing)

    def _missing(self, named: KernelReference) -> Iterator[tuple[str, str]]:
        """The options that would name what a kernel's text has imported."""
        is_in_recording = named.recording in self.recordings and _is_recorded(named)
        if ":" in named.kernel and _absolute(named.kernel) not in self.kernels and not is_in_recording:
            yield "--kernel", named.kernel
        if named.recording and named.recording not in self.recordings:
            yield "--recording", named.recording
        for function in filter(None, (named.reference, named.inputs)):
            if _absolute(function) not in self.references:
                yield "--reference", function


def _is_recorded(named: KernelReference) -> bool:
    try:
        recorded_kernel(named)
    except UsageError:
        return False
    return True


def _absolute(text: str) -> str:
    """A ``path.py:ATTRIBUTE`` with an absolute path; any other text as it is."""
    where, colon, attribute = text.rpartition(":")
    return f"{Path(where).absolute()}{colon}{attribute}" if where.endswith(".py") else text
