"""Document and screen of ``compare``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fp8tune.comparing import verdicts
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.output.documents import Document, value
from fp8tune.output.show import USUAL, Place, change
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, counts, microseconds, pairs, percent, ratio, short_gpu
from fp8tune.records import Kind
from fp8tune.stats.estimate import Estimate

LISTED = (ChangeVerdict.REGRESSION, ChangeVerdict.WRONG, ChangeVerdict.OPEN, ChangeVerdict.FASTER)
"""Verdicts of the rows that are listed without ``--all``."""


class Side(Document):
    """One revision."""

    name: str = value("Name that the user gave, or merge base.")
    commit: str = value("Full commit; + is appended for uncommitted changes.")


class ComparedSize(Place):
    """One kernel on one size and GPU at both revisions."""

    kind: str = value("How both sides were run: measured, simulated or interpreter. A simulated one runs no kernel.")
    verdict: ChangeVerdict = value("REGRESSION, WRONG, OPEN, FASTER, CLEAR, AGREE or SAME-CODE.")
    speedup: float | None = value("Time of A over time of B, paired by process; below 1 is slower.", "x")
    lower: float | None = value("Lower end of the speedup's 95 % confidence interval.", "x")
    upper: float | None = value("Upper end of the speedup's 95 % confidence interval.", "x")
    before_us: float | None = value("Time of A.", "us")
    after_us: float | None = value("Time of B.", "us")
    before_config: dict[str, int] | None = value("Launch config of A.")
    after_config: dict[str, int] | None = value("Launch config of B.")
    detectable: float | None = value("Least slowdown that such data call a REGRESSION in 95 % of runs.", "share")
    control: float | None = value("Change of the A/A control, which runs A once more.", "share")
    stable: bool | None = value("True if the control moved by no more than chance; null without one.", "", "is_stable")
    n: int = value("Rounds behind the verdict; of recorded results processes on the side with fewer.")
    reason: str = value("Why it is OPEN or WRONG, or that times were not compared.")
    disturbances: list[str] = value("Why some blocks were slower than they should be.")


class Comparison(Document, printed_by="compare"):
    """Two revisions."""

    before: Side = value("Side A.")
    after: Side = value("Side B.")
    speedup: float | None = value("Geometric mean over the sizes whose code changed.", "x")
    lower: float | None = value("Lower end of its 95 % confidence interval; null for recorded results.", "x")
    upper: float | None = value("Upper end of its 95 % confidence interval; null for recorded results.", "x")
    verdicts: dict[ChangeVerdict, int] = value("Number of sizes by verdict.")
    added: int = value("Sizes, or kernels, that only B has or gets right.")
    removed: int = value("Sizes, or kernels, that only A has.")
    control: float | None = value("Geometric mean of the change of the A/A control.", "share")
    stable: bool | None = value("True if no control moved by more than chance; null without one.", "", "is_stable")
    detectable: float | None = value("Least slowdown that is detected on every timed size.", "share")
    exit_code: int = value("Exit code of the command.")
    rows: list[ComparedSize] = value("One row per size and GPU, the most urgent verdict first.")


def make(comparison: verdicts.Comparison) -> Comparison:
    """Return a comparison as a document."""
    order = list(ChangeVerdict)
    rows = sorted(comparison.rows, key=lambda row: (order.index(row.verdict), -(row.ratio or 0)))
    detectable = [row.smallest_detectable for row in rows if row.effect and row.smallest_detectable]
    return Comparison.from_records(
        comparison,
        **_changes(comparison.ratio, comparison.overall, comparison.control),
        verdicts={verdict: comparison.counts[verdict] for verdict in order if comparison.counts[verdict]},
        detectable=change(max(detectable, default=None)),
        rows=[
            ComparedSize.from_records(
                row, **_changes(row.ratio, row.effect, row.control), detectable=change(row.smallest_detectable)
            )
            for row in rows
        ],
    )


def _changes(slowdown: float | None, effect: Estimate | None, control: Estimate | None) -> dict[str, Any]:
    """Return a speedup with its interval, and the change of the control, from a slowdown and estimates."""
    low, high = effect.interval if effect else (None, None)
    slowdowns = {"speedup": slowdown, "lower": high, "upper": low}
    speedups = {name: 1 / slowdown if slowdown else None for name, slowdown in slowdowns.items()}
    return {**speedups, "control": control.ratio - 1 if control else None}


def screen(document: Comparison, *, lists_all: bool = False) -> Screen:
    """Return the rows that need attention, or all, with the control below them."""
    rows = [row for row in document.rows if lists_all or row.verdict in LISTED]
    has_gpus = len({row.gpu for row in rows if row.gpu}) > 1
    columns = [
        Column("verdict", verdict_text),
        Column("kernel", lambda row: row.kernel, loses="start"),
        Column("size", size_text, loses="end"),
        Column("GPU", lambda row: short_gpu(row.gpu) if has_gpus else ""),
        number("speedup", lambda row: ratio(row.speedup)),
        number("A -> B us", lambda row: f"{microseconds(row.before_us)} -> {microseconds(row.after_us)}"),
    ]
    below = [about(document, len(document.rows) - len(rows)), *unknown(document), control(document)]
    return Screen([title(document)], columns, below, rows)


def title(document: Comparison) -> str:
    """Return the counts of the verdicts and the mean speedup."""
    verdicts = counts(document.verdicts) or "nothing to compare"
    verdicts += " (simulated)" if any(row.kind == Kind.SIMULATED for row in document.rows) else ""
    compared = sum(row.speedup is not None and row.verdict is not ChangeVerdict.SAME_CODE for row in document.rows)
    if not compared or document.speedup is None:
        return verdicts
    return f"{verdicts}; {document.speedup:.2f}x over {counted(compared, 'size')} (geometric mean)"


def about(document: Comparison, unlisted: int = 0) -> str:
    """Return the line that names both sides and counts what is not in the table."""
    sides = {"A": document.before, "B": document.after}
    texts = [f"{letter}: {side.name} {side.commit[:12]}{'+' * ('+' in side.commit)}" for letter, side in sides.items()]
    rest = counts({"added": document.added, "removed": document.removed})
    return f"{', '.join(texts)}; {counted(unlisted, 'size')} not listed{f', {rest}' if rest else ''}"


def unknown(document: Comparison) -> Iterator[str]:
    """Yield what was not compared: times without a GPU, outputs with a simulated clock."""
    if count := sum(row.reason == verdicts.AGREED for row in document.rows):
        yield f"{counted(count, 'size')}: {verdicts.AGREED}"
    if any(row.kind == Kind.SIMULATED for row in document.rows):
        yield verdicts.SIMULATED


def control(document: Comparison) -> str:
    """Return the line about the A/A control; empty for recorded results."""
    if document.control is None:
        return ""
    state = "stable" if document.stable else "drifted: something else uses this GPU, or its clocks are not steady"
    least = document.detectable
    detected = "" if least is None else f"; slowdowns from {percent(least, 1)} % are detected"
    return f"Control (A against A): {percent(abs(document.control), 1)} % apart, {state}{detected}."


def verdict_text(row: ComparedSize) -> str:
    """Return a verdict, and whether a simulated clock gave it."""
    return f"{row.verdict} (simulated)" if row.kind == Kind.SIMULATED else row.verdict


def size_text(row: Place) -> str:
    """Return a size with what is unusual about it. Its GPU says which FP8 format its output has."""
    attributes = {name: text for name, text in row.attributes.items() if name != "output"}
    unusual = [text for text in attributes.values() if text not in (*USUAL, "jagged")]
    return " ".join([pairs(row.size), *unusual]).strip() or "-"


def notices(rows: Sequence[ComparedSize]) -> Iterator[str]:
    """Yield why rows are open or wrong, and what disturbed them."""
    for row in rows:
        for reason in (row.reason, *row.disturbances):
            if reason in ("", verdicts.AGREED, verdicts.SIMULATED):
                continue
            yield f"{row.kernel} {pairs(row.size)}".strip() + f": {reason}"
