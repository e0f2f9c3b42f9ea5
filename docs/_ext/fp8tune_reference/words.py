"""The words that rows, verdicts and lookups are told apart by, and the exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from fp8tune.check.finding import Level
from fp8tune.check.lint import KeyVerdict
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.errors import EXIT_CODES
from fp8tune.records import Kind, Status
from fp8tune.render import legend
from fp8tune.stats.study import Verdict
from fp8tune_kernels.runtime.chain import Step
from fp8tune_reference import docstrings
from fp8tune_reference.markdown import code, marked, needed, prose, sections, table

WORDS: dict[str, type[StrEnum]] = {
    "`status`: how a trial ended": Status,
    "`kind`: where a row comes from": Kind,
    "`verdict` of a pick": Verdict,
    "`verdict` of `fp8tune compare`": ChangeVerdict,
    "`verdict` of `fp8tune lint`": KeyVerdict,
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
    """The verdicts of picks, with what to do."""
    return _legend("verdict", legend.VERDICTS)


def why_not() -> str:
    """Why a faster config is not the pick."""
    return _legend("reason", legend.WHY_NOT)


def show_columns() -> str:
    """The columns that ``show`` and ``explain`` print."""
    return _legend("column", legend.COLUMNS)


def _legend(what: str, terms: Mapping[str, legend.Term]) -> str:
    """What ``show --explain`` says. Raises UndocumentedError for a term without a meaning."""
    advised = any(term.advice for term in terms.values())
    rows = [
        (code(name), needed(term.meaning, f"{name} of the legend"), *([marked(term.advice)] if advised else []))
        for name, term in terms.items()
    ]
    return table([what, "meaning", *(["what to do"] if advised else [])], rows)


def change_verdicts() -> str:
    """How rows of a comparison end."""
    return of(ChangeVerdict)


def exit_codes() -> str:
    """How commands end."""
    return table(["code", "meaning"], [(code(number), prose(text)) for number, text in EXIT_CODES.items()])
