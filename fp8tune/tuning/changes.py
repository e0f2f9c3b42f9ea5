"""Source files with shorter lists of configs: one diff for all kernels, or the files themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fp8tune.errors import UsageError
from fp8tune.tables import files
from fp8tune.tables.formats import diff
from fp8tune.tables.picks import KernelPicks


@dataclass(frozen=True)
class Changed:
    """One source file."""

    path: Path
    name: PurePosixPath
    """Path relative to the folder that holds its package."""
    before: str
    after: str
    counts: tuple[tuple[int, int], ...]
    """For each kernel in it: configs before and after."""

    @property
    def diff(self) -> str:
        """Unified diff; empty if nothing changes."""
        return diff.unified(self.before, self.after, self.name)


def changed_files(kernels: Iterable[KernelPicks], within: float) -> tuple[list[Changed], list[str]]:
    """Return the files with configs that are at most ``within`` slower than the best, and notes for the user.

    A kernel whose list cannot be replaced gives a note that says why.
    """
    changed: dict[Path, Changed] = {}
    notes: list[str] = []
    for kernel in kernels:
        try:
            chosen = diff.fewest(kernel, within)
            assert kernel.recorded is not None
            path, name = diff.source_file(kernel.recorded)
            before = diff.source_text(path)
            file = changed.get(path) or Changed(path, name, before, before, ())
            after, more = diff.changed(kernel, chosen, file.after, name)
        except UsageError as error:
            notes.append(str(error))
            continue
        counts = (*file.counts, (len(kernel.recorded.configs), len(chosen.configs)))
        changed[path] = Changed(path, name, file.before, after, counts)
        notes += more
    return [file for file in changed.values() if file.after != file.before], notes


def differences(kernels: Iterable[KernelPicks]) -> list[str]:
    """Return what the sources of kernels have otherwise than when they were swept: their picks are of other code."""
    return list(filter(None, map(diff.difference, kernels)))


def apply(changed: Iterable[Changed], kernels: Iterable[KernelPicks]) -> None:
    """Write the files, or none if the source of any of the kernels is not the one that was swept.

    Raises:
        UsageError: The source of a kernel or a file is another than when it was swept or when the diff was made.
    """
    if reasons := differences(kernels):
        fix = "run fp8tune tune again, or take the diff of fp8tune export --for diff"
        raise UsageError(f"no file is changed: {'; '.join(reasons)}: {fix}")
    for file in changed:
        if files.read(file.path) != file.before:
            raise UsageError(f"{file.path} has changed meanwhile: run fp8tune tune again")
        files.update(file.path, file.after)
