"""Documents and screens of picks: ``show``, and the end of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Self

from fp8tune import records
from fp8tune.output.documents import Attributes, Document, Gpu, Size, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import (
    config_texts,
    counted,
    counts,
    layout,
    listed,
    mean,
    microseconds,
    pairs,
    percent,
    ratio,
    short_gpu,
    split_shared,
)
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Stage, Verdict
from fp8tune.text import short_dtype

if TYPE_CHECKING:
    from fp8tune.stats.explanation import Explanation  # imports NumPy, which most screens do not need

Sort = Literal["size", "speedup", "time", "peak"]

COARSE_LISTED = 6  # configs that the detail view lists at least

UNCHECKED = "simulated: no output was checked"

NO_RIVAL = "one config: nothing to compare"

USUAL = ("", "none", "contiguous", "unstated", "bfloat16")
"""Attributes that a screen need not name."""


class Place(Document):
    """One size of a kernel on one GPU."""

    kernel: str = value("Name of the kernel.", source="problem.kernel")
    size: Size = value("Problem size by dimension; empty if a comparison has none.", source="problem.shape")
    attributes: Attributes = value("What else distinguishes sizes: routing, layout, dtype and so on.", source="problem")
    gpu: Gpu = value("Name of the GPU, or its arch if it has no name.", source="device")
    arch: str = value("Architecture of the GPU, such as sm_90.", source="device.arch")


class ListedPick(Place):
    """The best config of one size on one GPU."""

    kind: str = value("How it was timed: measured, published or simulated.")
    speedup: float | None = value("Time of today's config over the pick's; null if not compared.", "x", "speedup_ratio")
    in_use: bool = value("True if today's config is the pick, and others were compared with it.")
    over_default: float | None = value(
        "Time of the declared default over the pick's; null if not compared.", "x", "default_ratio"
    )
    today: dict[str, int] | None = value("Config that a launch uses without the pick; null for published times.")
    today_from: str = value(
        "Source of today's config: own or shipped table, recording, program or default.", "", "today_origin"
    )
    today_us: float | None = value("Time of today's config.", "us")
    time_us: float = value("Time of the pick.", "us")
    config: dict[str, int] | None = value("Launch config; null if a publication names none.")
    peak_share: float | None = value("Share of the GPU's peak that the pick reaches.", "share", "ceiling_share")
    bound: str = value("What the peak is of: memory or compute; empty if it is not known.")
    gb_per_s: float | None = value("Bytes that the kernel must move over the time of the pick.", "GB/s")
    verdict: Verdict = value("How far the pick can be trusted; show --help has the words.")
    check: str = value("By what its outputs are right, such as exact; empty if none was compared.")
    next_best: float | None = value("Slowdown of the fastest other config; below 0 if it is faster.", "share")
    noise: float | None = value("Change of the default when it is timed again.", "share", "noise_floor_share")
    processes: int = value("Fresh processes that confirmed the pick; 0 after a coarse pass only.")
    timing: str = value("How launches were timed: gated, graph, or events before fp8tune 0.3.", "", "device.timing")
    source: str = value("Publication that reports the time; empty if measured here.")

    @classmethod
    def from_pick(cls, pick: records.Pick, *, is_stale: bool = False) -> ListedPick:
        """Return a stored pick as a document."""
        return cls.from_records(
            pick,
            in_use=pick.is_in_use,
            check=pick.checked_by if pick.kind is records.Kind.MEASURED else "",
            gb_per_s=pick.bytes_moved / pick.time_us / 1e3 if pick.bytes_moved else None,
            verdict=Verdict.STALE if is_stale else pick.verdict,
            next_best=change(pick.runner_up_ratio),
            processes=pick.processes if pick.stage == Stage.FINAL else 0,
        )


class Summary(Document):
    """Picks of one kernel on one GPU."""

    kernel: str = value("Name of the kernel.")
    gpu: str = value("Name of the GPU.")
    sizes: int = value("Sizes that match, those without a right config included.")
    speedup: float | None = value("Geometric mean of the speedups over today's configs.", "x")
    in_use: bool = value("True if every pick with a speedup is in use.")
    checked: bool = value("False if a pick is simulated: then no output was compared.")
    over_default: float | None = value("Geometric mean of the speedups over the default.", "x")

    @classmethod
    def from_group(cls, group: Sequence[ListedPick], failed: Sequence[Place], **values: Any) -> Self:
        """Return the picks of one kernel on one GPU, and its sizes without a right config, as a document."""
        place: Place = [*group, *failed][0]
        compared = [pick.in_use for pick in group if pick.speedup or pick.in_use]
        return cls(
            kernel=place.kernel,
            gpu=place.gpu,
            sizes=len(group) + len(failed),
            speedup=mean(pick.speedup for pick in group),
            in_use=bool(compared) and all(compared),
            checked=all(pick.kind != records.Kind.SIMULATED for pick in group),
            over_default=mean(pick.over_default for pick in group),
            **values,
        )


class KernelSummary(Summary):
    """All picks of one kernel on one GPU."""

    peak_share: float | None = value("Median share of the peak.", "share")
    verdicts: dict[Verdict, int] = value("Number of sizes by verdict.")


class Overview(Document, printed_by="show"):
    """All kernels, or the kernels of one sweep."""

    document: Literal["overview"] = value("Distinguishes documents.", default="overview")
    database: str = value("Database that was read.")
    triton: list[str] = value("Versions of Triton that measured the picks.")
    kernels: list[KernelSummary] = value("One row per kernel and GPU.")

    def screen(self, next_line: str = "") -> Screen:
        """Return the screen: one row per kernel and GPU."""
        rows = self.kernels
        gpus = list(dict.fromkeys(short_gpu(row.gpu) for row in rows))
        where = listed(gpus) if len(gpus) > 1 else rows[0].gpu
        triton = f", Triton {listed(self.triton)}" if self.triton else ""
        kernels = counted(len({row.kernel for row in rows}), "kernel")
        title = f"{self.database}: {counted(sum(row.sizes for row in rows), 'pick')} of {kernels} on {where}{triton}"
        is_default = all(row.speedup == row.over_default for row in rows)  # today's config, everywhere
        columns = [
            Column("kernel", lambda row: row.kernel, loses="start"),
            Column("gpu", lambda row: short_gpu(row.gpu) if len(gpus) > 1 else ""),
            number("sizes", lambda row: f"{row.sizes:,}"),
            number("speedup", lambda row: ratio(row.speedup, row.in_use)),
            number("over default", lambda row: "" if is_default else ratio(row.over_default), loses="all"),
            number("% peak", lambda row: percent(row.peak_share), loses="all"),
            Column("verdicts", lambda row: counts(row.verdicts), loses="end"),
        ]
        return Screen([title], columns, [next_line, "" if all(row.checked for row in rows) else UNCHECKED], rows)


class PickList(Summary, printed_by="show KERNEL"):
    """Picks of one kernel on one GPU."""

    document: Literal["picks"] = value("Distinguishes documents.", default="picks")
    picks: list[ListedPick] = value("One row per size.")
    wrong: list[Size] = value("Sizes without a right config.")
    elsewhere: dict[str, int] = value("Number of picks by GPU that are not listed.")

    def screen(self, lines: Sequence[str] = (), note: str = "") -> Screen:
        """Return the screen: one row per size, and lines below it. ``note`` ends the line about today's configs."""
        over_default = number("speedup", lambda row: ratio(row.over_default)) if self.in_use else None
        table, shared = pick_table(self.picks, over_default)
        is_whole = len(self.picks) + len(self.wrong) == self.sizes
        sizes = counted(self.sizes, "size") if is_whole else f"{len(self.picks)} of {counted(self.sizes, 'size')}"
        title = f"{self.kernel} on {self.gpu}: {sizes}{f' with {shared}' if shared else ''}"
        title += ", all in use" if self.in_use else ""
        gain = NO_RIVAL if {row.verdict for row in self.picks} == {Verdict.ALONE} else ""
        if self.in_use and self.over_default:
            gain = f"speedup over the default: {ratio(self.over_default)} (geometric mean)"
        elif self.speedup:
            sources = listed(dict.fromkeys(row.today_from for row in self.picks if row.today_from))
            gain = f"{ratio(self.speedup)} over today's configs (geometric mean; from {sources}){note}"
        wrong = ", ".join(map(pairs, self.wrong[:3])) + (", ..." if self.wrong[3:] else "")
        others = ", ".join(f"{gpu} ({counted(count, 'size')})" for gpu, count in self.elsewhere.items())
        below = [
            *table.below,
            f"wrong: no config is right for {wrong} (--failed)" if wrong else "",
            f"also on {others}: --device" if others else "",
            "" if self.checked else UNCHECKED,
            *lines,
        ]
        return replace(table, above=[title, gain], below=below)


class Candidate(Document):
    """One config of a size."""

    config: dict[str, int] | None = value("Launch config; null if a publication names none.")
    status: str = value("Outcome: ok, wrong, out_of_resources and so on.")
    time_us: float | None = value("Time of the config; null if it failed.", "us")
    slower: float | None = value("Slowdown against the pick; below 0 if the config is faster.", "share")
    lower: float | None = value("Lower bound of the slowdown; null without a confirmation.", "share")
    upper: float | None = value("Upper bound of the slowdown; null without a confirmation.", "share")
    confirmed: bool = value("True if timed in fresh processes, false after the coarse pass only.")
    roles: list[str] = value("Roles of the config: pick, today, default.")
    reason: str = value("Reason why it has no time; empty otherwise.")

    @property
    def interval(self) -> str:
        """Bounds of the slowdown with the config's role, as text."""
        text = "" if self.confirmed or "pick" in self.roles else "coarse pass only"
        if self.lower is not None and self.upper is not None:
            text = f"{percent(self.lower, 1)} to {percent(self.upper, 1)} %"
        role = "today's config" if "today" in self.roles else "default" if "default" in self.roles else ""
        return "  ".join(filter(None, (text, role)))


class PickDetail(Document, printed_by="show KERNEL SIZE"):
    """One size with all its configs, if one size matches."""

    document: Literal["detail"] = value("Distinguishes documents.", default="detail")
    pick: ListedPick = value("The pick of the size.")
    why: str = value("Reason why the next best config is not the pick, if that is faster; empty otherwise.")
    candidates: list[Candidate] = value("All configs: the pick, confirmed ones, others by time, failed ones.")
    keep_band: float = value("Slowdown against a rival that a proven pick may have.", "share")

    def screen(self, top: int | None = None, lines: Sequence[str] = ()) -> Screen:
        """Return the screen: confirmed configs, some of the coarse pass, why the pick won, and lines below it."""
        pick, timed = self.pick, [row for row in self.candidates if row.time_us is not None]
        rows = timed[: top or max(COARSE_LISTED, sum(row.confirmed for row in timed) + 1)]
        configs, legend = config_texts([row.config for row in rows], spelled=True)
        columns = [
            number("#", [str(place) for place in range(1, len(rows) + 1)]),
            Column("config", configs, loses="end"),
            number("time us", lambda row: microseconds(row.time_us)),
            number("slower", lambda row: "pick" if "pick" in row.roles else f"{percent(row.slower, 1)} %"),
            Column("interval", lambda row: row.interval, loses="end"),
        ]
        attributes = (layout(pick.attributes[name]) for name in ("routing", "layout", "dtype"))
        kind = ", ".join(short_dtype(text) for text in attributes if text not in USUAL)
        title = f"{pick.kernel} {pairs(pick.size)}{f' ({kind})' if kind else ''} on {pick.gpu}"
        rest = len(timed) - len(rows)
        runs = [f"confirmed in {counted(pick.processes, 'fresh process')}" if pick.processes else ""]
        runs += ["timed in CUDA graphs" if pick.timing == records.GRAPH else ""]
        notes = [f"({counted(rest, 'more config')}: --top {len(timed)})" if rest else "", ", ".join(filter(None, runs))]
        failed = counts(Counter(row.status.replace("_", " ") for row in self.candidates if row.time_us is None))
        below = [legend, "  ".join(filter(None, notes)), f"failed: {failed} (--failed)" if failed else "", *lines]
        below += [UNCHECKED] if pick.kind == records.Kind.SIMULATED else []
        return Screen([title, self._gain(), f"{pick.verdict}: {self._reason()}"], columns, below, rows)

    def _gain(self) -> str:
        pick = self.pick
        gain, times = (pick.over_default if pick.in_use else pick.speedup), f"{microseconds(pick.time_us)} us"
        times += "" if pick.peak_share is None else f", {percent(pick.peak_share)} % of peak"
        if not gain and not pick.in_use:
            is_missing = pick.today is not None and pick.verdict != Verdict.ALONE
            return times + ("; today's config was not timed" if is_missing else "")
        rival = "the default" if pick.in_use else f"today's config ({pick.today_from})"
        parts = [f"in use ({pick.today_from})"] if pick.in_use else []
        parts += [f"{ratio(gain)} over {rival}"] if gain else []
        return f"{'; '.join(parts)}: {f'{microseconds(pick.time_us * gain)} -> ' if gain else ''}{times}"

    def _reason(self) -> str:
        band, share, rival = percent(self.keep_band, 1), self.pick.next_best, ""
        if share is not None:
            why = f" ({self.why})" if self.why else ""
            rival = f"; the next best is {percent(abs(share), 1)} % {'slower' if share >= 0 else 'faster'}{why}"
        return {
            Verdict.PROVEN: f"no rival is over {band} % faster{rival}",
            Verdict.OPEN: f"noise may hide a rival that is over {band} % faster{rival}",
            Verdict.ALONE: NO_RIVAL,
            Verdict.QUICK: f"coarse pass in one process{rival}; confirm it with fp8tune sweep",
            Verdict.STALE: f"this GPU runs other code, Triton or driver now{rival}; run fp8tune sweep again",
            Verdict.PUBLISHED: f"reported by {self.pick.source}, not measured here",
            Verdict.WRONG: "no config gives the right output",
        }[self.pick.verdict]


def change(ratio: float | None) -> float | None:
    """Return a ratio as a change: 1.03 is 0.03."""
    return None if ratio is None else ratio - 1


def _order(sort: Sort, time: Callable[[Any], float]) -> Callable[[Any], tuple[float, ...]]:
    """Return the sort key of rows: the largest gain, the longest time or the least share of the peak first."""
    return {
        "size": lambda row: (),
        "speedup": lambda row: (-(row.speedup or 0.0), -(row.over_default or 0.0)),
        "peak": lambda row: (2.0 if row.peak_share is None else row.peak_share,),
        "time": lambda row: (-time(row),),
    }[sort]


def make_overview(
    picks: Sequence[ListedPick],
    wrong: Sequence[Place],
    database: str,
    triton: Iterable[str] = (),
    sort: Sort = "size",
    top: int | None = None,
) -> Overview:
    """Summarize picks, and sizes without a right config, by kernel and GPU.

    Rows are sorted by ``size``: recorded kernels before those that come with fp8tune, then proven ones before quick
    ones, then the largest speedup.
    """
    groups, trust, rows = group_by([*picks, *wrong], lambda row: (row.kernel, row.gpu)), [*Verdict], []
    for group in groups.values():
        chosen = [row for row in group if isinstance(row, ListedPick)]
        failed = [row for row in group if not isinstance(row, ListedPick)]
        verdicts = [*(pick.verdict for pick in chosen), *[Verdict.WRONG] * len(failed)]
        by_trust = dict(Counter(sorted(verdicts, key=trust.index)))
        shares = [pick.peak_share for pick in chosen if pick.peak_share is not None]
        peak = median(shares) if shares else None
        rows.append(KernelSummary.from_group(chosen, failed, peak_share=peak, verdicts=by_trust))

    def usual(row: KernelSummary) -> tuple[object, ...]:
        first = trust.index(next(iter(row.verdicts)))
        return ":" not in row.kernel, first, row.in_use, *_order("speedup", float)(row), row.kernel

    def time_us(row: KernelSummary) -> float:
        return sum(pick.time_us for pick in groups[row.kernel, row.gpu] if isinstance(pick, ListedPick))

    rows.sort(key=usual)
    rows.sort(key=_order(sort, time_us))
    return Overview(database=database, triton=list(triton), kernels=rows[:top])


def make_pick_list(
    picks: Sequence[ListedPick], wrong: Sequence[Place], gpu: str, sort: Sort = "size", top: int | None = None
) -> PickList:
    """List the picks of one kernel on one of its GPUs, with the sizes that have no right config."""

    def size_order(pick: ListedPick) -> tuple[object, ...]:
        sizes = tuple((isinstance(size, str), size) for size in pick.size.values())
        return len(sizes), sizes, tuple(pick.attributes.values())

    here, failed = [pick for pick in picks if pick.gpu == gpu], [place for place in wrong if place.gpu == gpu]
    rows = sorted(here, key=size_order) if sort == "size" else sorted(here, key=_order(sort, lambda row: row.time_us))
    elsewhere = Counter(pick.gpu for pick in picks if pick.gpu != gpu)
    sizes = [place.size for place in failed]
    return PickList.from_group(here, failed, picks=rows[:top], wrong=sizes, elsewhere=elsewhere)


def make_detail(pick: ListedPick, explanation: Explanation) -> PickDetail:
    """Return one size with all its configs."""
    study, candidates = explanation.study, []
    roles = {"pick": study.pick.config, "today": study.today and study.today.config, "default": study.default}
    for attempt in explanation.attempts:
        lower, upper = map(change, attempt.interval or (None, None))
        named = [role for role, config in roles.items() if config == attempt.config]
        values = {"slower": change(attempt.slowdown), "lower": lower, "upper": upper, "roles": named}
        candidates.append(Candidate.from_records(attempt, **values, confirmed=attempt.stage is Stage.FINAL))
    band = explanation.plan.keep_band
    return PickDetail(pick=pick, why=str(study.precedence), candidates=candidates, keep_band=band)


def size_columns(
    sizes: Sequence[Mapping[str, object]], attributes: Sequence[Mapping[str, str]]
) -> tuple[dict[str, object], list[Column]]:
    """Return the dimensions that all sizes share, and columns of dimensions and attributes that differ."""
    shared, dims = split_shared(sizes)
    _, names = split_shared(attributes)
    columns = [number(dim, [str(size.get(dim, "-")) for size in sizes]) for dim in dims]
    for name in names if len(sizes) > 1 else ():  # a single row shares nothing, but needs no column for it
        is_launch = name == "layout" and all(row[name].startswith(records.RECORDED) for row in attributes)
        if not is_launch or len({*map(pairs, sizes)}) < len(sizes):  # else its size names a launch
            texts = [short_dtype(layout(row[name])) or "-" for row in attributes]
            columns.append(Column("launch" if is_launch else name, texts, loses="end"))
    return shared, columns


def pick_table(rows: Sequence[ListedPick], gain: Column | None = None) -> tuple[Screen, str]:
    """Return a table of picks, with the legend of their configs below it, and the sizes that all rows share.

    ``gain`` is its first column after the size; by default the speedup over today's config.
    """
    shared, columns = size_columns([row.size for row in rows], [row.attributes for row in rows])
    configs, legend = config_texts([row.config for row in rows])
    columns += [
        gain or number("speedup", lambda row: ratio(row.speedup, row.in_use)),
        number("time us", lambda row: microseconds(row.time_us)),
        Column("config", configs, loses="end"),
        number("% peak", lambda row: percent(row.peak_share), loses="all"),
        Column("verdict", lambda row: row.verdict),
        number("GB/s", lambda row: f"{row.gb_per_s:,.0f}" if row.gb_per_s else "-", wide=True),
        number("over default", lambda row: ratio(row.over_default), wide=True),
        number("next best %", lambda row: percent(row.next_best, 1), wide=True),
        number("noise %", lambda row: percent(row.noise, 2), wide=True),
        number("processes", lambda row: str(row.processes or "-"), wide=True),
        Column("timing", lambda row: row.timing if row.timing == records.GRAPH else "", wide=True),
    ]
    return Screen([], columns, [legend], rows), pairs(shared)
