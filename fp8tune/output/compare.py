"""Document and screen of ``compare``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8tune.comparing import verdicts
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.output.documents import Document, value
from fp8tune.output.show import Place, place
from fp8tune.output.tables import Column, Screen, number, speedups, words
from fp8tune.output.text import counted, microseconds, pairs, percent, ratio, short_gpu
from fp8tune.stats.estimate import Estimate

LISTED = (ChangeVerdict.REGRESSION, ChangeVerdict.WRONG, ChangeVerdict.OPEN, ChangeVerdict.FASTER)
"""Verdicts of the rows that are listed without ``--all``."""

_USUAL = ("", "none", "jagged", "contiguous", "unstated", "bfloat16", "float8_e4m3fn")


class Side(Document):
    """One revision."""

    name: str = value("Name that the user gave, or merge base.")
    commit: str = value("Full commit; + is appended for uncommitted changes.")


class ComparedSize(Place):
    """One kernel on one size and GPU at both revisions."""

    verdict: ChangeVerdict = value("REGRESSION, WRONG, OPEN, FASTER, CLEAR or SAME-CODE.")
    speedup: float | None = value("Time of A over time of B, paired by process; below 1 is slower.", "x")
    lower: float | None = value("Lower end of the speedup's 95 % confidence interval.", "x")
    upper: float | None = value("Upper end of the speedup's 95 % confidence interval.", "x")
    before_us: float | None = value("Time of A.", "us")
    after_us: float | None = value("Time of B.", "us")
    before_config: dict[str, int] | None = value("Launch config of A.")
    after_config: dict[str, int] | None = value("Launch config of B.")
    detectable: float | None = value("Least slowdown that such data call a REGRESSION in 95 % of runs.", "share")
    control: float | None = value("Change of the A/A control, which runs A once more.", "share")
    stable: bool | None = value("True if the control moved by no more than chance; null without one.")
    n: int = value("Rounds behind the verdict; of recorded results processes on the side with fewer.")
    reason: str = value("Why it is OPEN or WRONG.")
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
    stable: bool | None = value("True if each control moved by no more than chance; null without one.")
    detectable: float | None = value("Least slowdown that is detected on every timed size.", "share")
    exit_code: int = value("Exit code of the command.")
    rows: list[ComparedSize] = value("One row per size and GPU, the most urgent verdict first.")


def make(comparison: verdicts.Comparison) -> Comparison:
    """Return a comparison as a document."""
    order = list(ChangeVerdict)
    rows = sorted(comparison.rows, key=lambda row: (order.index(row.verdict), -(row.ratio or 0)))
    detectable = [row.smallest_detectable for row in rows if row.effect]
    return Comparison.from_records(
        comparison,
        before=Side.from_records(comparison.before),
        after=Side.from_records(comparison.after),
        speedup=_inverse(comparison.ratio),
        **_interval(comparison.overall),
        verdicts={verdict: comparison.counts[verdict] for verdict in ChangeVerdict if comparison.counts[verdict]},
        control=_change(comparison.control.ratio if comparison.control else None),
        stable=comparison.is_stable,
        detectable=_change(max((bound for bound in detectable if bound), default=None)),
        rows=[_row(row) for row in rows],
    )


def _row(row: verdicts.ComparedRow) -> ComparedSize:
    return ComparedSize.from_records(
        row,
        **place(row),
        speedup=_inverse(row.ratio),
        **_interval(row.effect),
        detectable=_change(row.smallest_detectable),
        control=_change(row.control.ratio if row.control else None),
        stable=row.is_stable,
    )


def _inverse(ratio: float | None) -> float | None:
    return 1 / ratio if ratio else None


def _change(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1


def _interval(effect: Estimate | None) -> dict[str, float | None]:
    """Return the bounds of a speedup from the estimate of a change."""
    low, high = effect.interval if effect else (None, None)
    return {"lower": _inverse(high), "upper": _inverse(low)}


def screen(document: Comparison, *, lists_all: bool = False) -> Screen:
    """Return the screen of a comparison: changed and open rows, or all."""
    rows = [row for row in document.rows if lists_all or row.verdict in LISTED]
    gpus = {row.gpu for row in document.rows if row.gpu}
    return Screen(
        [title(document)],
        [
            words("verdict", [row.verdict for row in rows]),
            Column("kernel", [row.kernel for row in rows], cut="start"),
            Column("size", [size_text(row) for row in rows], cut="end"),
            Column("GPU", [short_gpu(row.gpu) for row in rows] if len(gpus) > 1 else []),
            speedups([ratio(row.speedup) for row in rows]),
            number("A -> B us", [f"{microseconds(row.before_us)} -> {microseconds(row.after_us)}" for row in rows]),
        ],
        [about(document, len(document.rows) - len(rows)), control(document)],
        rows,
    )


def title(document: Comparison) -> str:
    """Return the counts of the verdicts and the mean speedup."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in document.verdicts.items()) or "nothing to compare"
    compared = sum(row.speedup is not None and row.verdict is not ChangeVerdict.SAME_CODE for row in document.rows)
    if not compared or document.speedup is None:
        return counts
    return f"{counts}; {document.speedup:.2f}x over {counted(compared, 'size')} (geometric mean)"


def about(document: Comparison, unlisted: int = 0) -> str:
    """Return the line that names both sides and counts what is not in the table."""
    sides = (f"{side.name} {_commit(side)}" for side in (document.before, document.after))
    line = "A: {}, B: {}; ".format(*sides) + f"{counted(unlisted, 'size')} not listed"
    numbers = {"added": document.added, "removed": document.removed}
    return ", ".join([line, *(f"{count} {word}" for word, count in numbers.items() if count)])


def _commit(side: Side) -> str:
    return side.commit[:12] + ("+" if side.commit.endswith("+") else "")


def control(document: Comparison) -> str:
    """Return the line about the A/A control; empty for recorded results."""
    if document.control is None:
        return ""
    line = f"Control (A against A): {percent(abs(document.control), 1)} % apart, "
    line += "stable" if document.stable else "drifted: something else uses this GPU, or its clocks are not steady"
    detected = (
        "" if document.detectable is None else f"; slowdowns from {percent(document.detectable, 1)} % are detected"
    )
    return f"{line}{detected}."


def size_text(row: ComparedSize) -> str:
    """Return a size with what is unusual about it."""
    unusual = [text for text in row.attributes.values() if text not in _USUAL]
    return " ".join([pairs(row.size), *unusual]).strip() or "-"


def notices(rows: Sequence[ComparedSize]) -> Iterator[str]:
    """Yield why rows are open or wrong, and what disturbed them."""
    for row in rows:
        reasons = [row.reason] if row.reason else []
        for reason in [*reasons, *row.disturbances]:
            yield f"{row.kernel} {pairs(row.size)}".strip() + f": {reason}"
