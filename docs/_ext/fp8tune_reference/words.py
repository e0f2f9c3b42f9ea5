"""The words that rows, verdicts and lookups are told apart by, and the exit codes."""

from __future__ import annotations

from enum import StrEnum

from fp8tune.check.findings import Level
from fp8tune.check.keys import KeyVerdict
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.errors import EXIT_CODES
from fp8tune.records import Kind, Status
from fp8tune.stats.study import Precedence, Verdict
from fp8tune_kernels.runtime.chain import Step
from fp8tune_reference import docstrings
from fp8tune_reference.markdown import code, needed, prose, sections, table

WORDS: dict[str, type[StrEnum]] = {
    "`status`: how a trial ended": Status,
    "`kind`: where a row comes from": Kind,
    "`verdict` of a pick": Verdict,
    "`verdict` of `fp8tune compare`": ChangeVerdict,
    "`verdict` of `fp8tune doctor KERNEL`": KeyVerdict,
    "`step` of a lookup": Step,
    "`level` of `fp8tune doctor`": Level,
}
"""Heading -> the words below it."""


def part() -> str:
    """A table for each set of words."""
    return sections(*(sections(f"## {heading}", of(words)) for heading, words in WORDS.items()))


def of(words: type[StrEnum]) -> str:
    """One set of words. Raises UndocumentedError for one without a docstring."""
    texts = docstrings.of_attributes(words)
    rows = [(code(one), prose(needed(texts.get(one.name, ""), f"{words.__name__}.{one.name}"))) for one in words]
    return table(["word", "meaning"], rows)


def pick_verdicts() -> str:
    """Return the verdicts of picks."""
    return of(Verdict)


def why_not() -> str:
    """Return the reasons why a faster config is not the pick."""
    texts = docstrings.of_attributes(Precedence)
    rows = [(code(word), prose(needed(texts.get(word.name, ""), word.name))) for word in Precedence if word]
    return table(["reason", "meaning"], rows)


def change_verdicts() -> str:
    """How rows of a comparison end."""
    return of(ChangeVerdict)


def exit_codes() -> str:
    """How commands end."""
    return table(["code", "meaning"], [(code(number), prose(text)) for number, text in EXIT_CODES.items()])
