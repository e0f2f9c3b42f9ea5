"""What the words in the tables of ``show`` and ``explain`` mean, and what to do about them; pages include these lines.

Plain text: no markup, a sentence each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8tune.render.report import Report
from fp8tune.render.terminal import folded, terminal_width


@dataclass(frozen=True)
class Term:
    """One word of a table."""

    meaning: str
    advice: str = ""
    """What to do about it; empty where there is nothing to do."""

    @property
    def line(self) -> str:
        """Both, in one line."""
        return f"{self.meaning}; {self.advice}" if self.advice else self.meaning


COLUMNS: Mapping[str, Term] = {
    "picks": Term("problems with a best config, counted once a GPU"),
    "settled": Term("certified, near-tie, kept-incumbent or only: fresh processes agree on the pick"),
    "open": Term("ambiguous or unresolvable: the pick may lose a little", "show --verdict WORD lists them"),
    "quick": Term("picked from the screen alone, in one process", "sweep without --quick to have finals"),
    "GPUs": Term("GPU models that have rows"),
    "newest": Term("age of the newest row"),
    "us": Term("time in microseconds: the geometric mean over fresh processes, of a screen the median"),
    "GB/s": Term("bytes that the kernel has to move, divided by its time"),
    "ceiling": Term("median over the picks of their share of what the hardware gives"),
    "of ceiling": Term(
        "share of what the hardware gives: the best memory rate measured there, or the FLOP/s of a dense GEMM",
        "a low share leaves room for a better kernel or more configs",
    ),
    "next best": Term(
        "how much slower the fastest other config is; with a minus sign it is faster, and why it is no pick follows"
    ),
    "noise": Term("how far the default was from itself under a second name", "trust no smaller difference"),
    "verdict": Term("what is known of the pick"),
    "n": Term("fresh processes that the time rests on; of published rows, printed figures"),
    "from": Term("where the time comes from; unfinished: the sweep was broken off", "finish it with the same command"),
    "routing": Term("how rows spread over groups"),
    "layout": Term("how the input lies in memory"),
    "bound": Term("what the share of the ceiling is of: memory or compute"),
    "configs": Term("how many configs ended so"),
    "reason": Term("why they have no time"),
    "next best has": Term("the axes in which the next best config differs, with its values"),
    "slower": Term("its time over the pick's; with a minus sign it is faster"),
    "interval": Term("where that lies: a chance of 2.5 % to be wrong is shared out over all rivals of the pick"),
    "stage": Term("finals: fresh processes; screen: one process, compared with the screen's times alone"),
}
"""Header of a column -> what it says."""

VERDICTS: Mapping[str, Term] = {
    "certified": Term("proven faster than every other finalist", "use it"),
    "near-tie": Term("at most 1.5 % slower than the fastest: several configs are as good", "use it"),
    "kept-incumbent": Term(
        "the committed config: another is preferred, but not proven faster by more than 1.5 %", "use it"
    ),
    "only": Term(
        "the only finalist: nothing else was timed, or the screen left nothing near it",
        "sweep with more of the grid if you narrowed it",
    ),
    "ambiguous": Term("it may lose more than 1.5 %: noise hides the rest", "sweep --again on a quiet GPU"),
    "unresolvable": Term("too short to tell configs apart, or timed from a cache", "keep what is there"),
    "quick": Term("screened in one process, without finals", "sweep without --quick to be sure"),
    "published": Term("a row that others printed, not measured here", "sweep it on such a GPU"),
}
"""Verdict -> what it says. ``published`` stands for no verdict."""

WHY_NOT: Mapping[str, Term] = {
    "tied": Term("both are within 1 % of the fastest: the first in a fixed order is taken"),
    "default stays": Term("the pick is the kernel's declared default, and nothing is proven to be faster"),
    "committed stays": Term("the shipped table holds the pick, and nothing is proven to be faster by more than 1.5 %"),
    "too short": Term("times are too short to tell the two apart"),
    "coarse pass": Term("the screen alone timed the next best, in one process, which proves nothing"),
}
"""Why a faster config is not the pick -> what it says."""

STATUSES: Mapping[str, Term] = {
    "ok": Term("right, and timed"),
    "wrong": Term("its output differs from the reference", "report the kernel: it is never picked"),
    "compile_error": Term("it does not compile on this arch"),
    "out_of_resources": Term("it needs more registers or shared memory than the GPU has"),
    "out_of_memory": Term("the GPU's memory was full", "sweep on an idle GPU"),
    "crashed": Term("its process died", "sweep it again with --again"),
    "timeout": Term("it took too long"),
    "untimed": Term("right, but an input has one value throughout, on which a GPU is too fast", "give other inputs"),
    "pruned": Term("not tried, for the reason beside it"),
}
"""How a config ended -> what it says."""

ALL: tuple[Mapping[str, Term], ...] = (COLUMNS, VERDICTS, WHY_NOT, STATUSES)


def lines(headers: Collection[str], words: Collection[str] = (), width: int | None = None) -> Iterator[str]:
    """The legend of the columns with these headers and of the words that occur in their cells.

    One line each, or as many as a terminal of ``width`` columns needs.
    """
    yield "what the columns and words mean"
    shown = {name: term for name, term in COLUMNS.items() if name in headers}
    for terms in ALL[1:]:
        shown |= {name: term for name, term in terms.items() if name in words and name not in shown}
    longest = max(map(len, shown), default=0)
    for name, term in shown.items():
        yield from folded(term.line, width, f"  {name:{longest}}  ")


def of(reports: Sequence[Report[Any]], more: Collection[str] = ()) -> Iterator[str]:
    """The legend of some tables and of ``more`` words, as wide as the terminal."""
    headers = [column.header for report in reports for column in report.columns]
    words = {cell for report in reports for row in report.cells() for cell in row}
    said = {word for report in reports for text in report.title.split(", ") for word in (text, text.split()[-1])}
    return lines(headers, {*words, *said, *more}, terminal_width())
