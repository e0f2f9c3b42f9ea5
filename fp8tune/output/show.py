"""Documents and screens of picks: ``show``, and the end of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from fp8tune import records
from fp8tune.output.documents import Document, value
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import (
    ConfigNames,
    counted,
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
from fp8tune.stats.study import Stage, Verdict
from fp8tune.text import short_dtype

if TYPE_CHECKING:
    from fp8tune.stats.explanation import Explanation  # imports NumPy, which most screens do not need

Sort = Literal["size", "speedup", "time", "peak"]

COARSE_LISTED = 6  # configs that the detail view lists at least

ATTRIBUTES = {
    "routing": "routing",
    "layout": "input_layout",
    "dtype": "in_dtype",
    "output": "fp8_dtype",
    "scale": "scale_mode",
}
"""What distinguishes problem sizes beside their dimensions, with the field of a problem."""

USUAL = ("", "none", "contiguous", "unstated", "bfloat16")
"""Attributes that a screen need not name."""


class Place(Document):
    """One size of a kernel on one GPU."""

    kernel: str = value("Name of the kernel.")
    size: dict[str, int | str] = value("Problem size by dimension; empty if a comparison has none.")
    attributes: dict[str, str] = value("What else distinguishes sizes: routing, layout, dtype, output and scale.")
    gpu: str = value("Name of the GPU, or its arch if it has no name.")
    arch: str = value("Architecture of the GPU, such as sm_90.")


def place(record: Any) -> dict[str, Any]:
    """Return the fields of :class:`Place` from a record with a problem and a device, which a comparison may lack."""
    problem, device = record.problem, record.device
    return {
        "kernel": problem.kernel if problem else record.kernel,
        "size": size_of(problem) if problem else {},
        "attributes": {name: getattr(problem, field) for name, field in ATTRIBUTES.items()} if problem else {},
        "gpu": (device.name or device.arch) if device else "",
        "arch": device.arch if device else "",
    }


class ListedPick(Place):
    """The best config of one size on one GPU."""

    kind: str = value("How it was timed: measured, published or simulated.")
    speedup: float | None = value("Time of today's config over time of the pick; null if today's was not timed.", "x")
    in_use: bool = value("True if today's config is the pick.")
    over_default: float | None = value("Time of the declared default over time of the pick.", "x")
    today: dict[str, int] | None = value("Config that a launch uses without the pick; null for published times.")
    today_from: str = value("Source of today's config: own table, shipped table, recording or default.")
    today_us: float | None = value("Time of today's config.", "us")
    time_us: float = value("Time of the pick.", "us")
    config: dict[str, int] | None = value("Launch config; null if a publication names none.")
    peak_share: float | None = value("Share of the GPU's peak that the pick reaches; 1 is all of it.", "share")
    bound: str = value("What the peak is of: memory or compute; empty if it is not known.")
    gb_per_s: float | None = value("Bytes that the kernel must move over the time of the pick.", "GB/s")
    verdict: Verdict = value("How far the pick can be trusted; show --help has the words.")
    next_best: float | None = value("Slowdown of the fastest other config; below 0 if it is faster.", "share")
    noise: float | None = value("Difference between the default and the default timed again.", "share")
    processes: int = value("Fresh processes that confirmed the pick; 0 after a coarse pass only.")
    timing: str = value("How launches were timed: gated, graph, or events before fp8tune 0.3; empty if none was.")
    source: str = value("Publication that reports the time; empty if measured here.")

    @classmethod
    def from_pick(cls, pick: records.Pick, *, is_stale: bool = False) -> ListedPick:
        """Return a stored pick as a document."""
        return cls.from_records(
            pick,
            **place(pick),
            speedup=pick.speedup_ratio,
            in_use=pick.today is not None and pick.today == pick.config,
            over_default=pick.default_ratio,
            today_from=pick.today_origin or "",
            peak_share=pick.ceiling_share,
            bound=pick.bound or "",
            gb_per_s=pick.bytes_moved / pick.time_us / 1e3 if pick.bytes_moved else None,
            verdict=Verdict.STALE if is_stale else Verdict(pick.verdict),
            next_best=None if pick.runner_up_ratio is None else pick.runner_up_ratio - 1,
            noise=pick.noise_floor_share,
            processes=pick.processes if pick.stage == Stage.FINAL else 0,
            timing=pick.device.timing,
        )


class Summary(Document):
    """Picks of one kernel on one GPU."""

    kernel: str = value("Name of the kernel.")
    gpu: str = value("Name of the GPU.")
    sizes: int = value("Sizes that match, those without a right config included.")
    speedup: float | None = value("Geometric mean of the speedups over today's configs.", "x")
    in_use: bool = value("True if every pick with a speedup is in use.")
    over_default: float | None = value("Geometric mean of the speedups over the default.", "x")


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


class PickList(Summary, printed_by="show KERNEL"):
    """Picks of one kernel on one GPU."""

    document: Literal["picks"] = value("Distinguishes documents.", default="picks")
    picks: list[ListedPick] = value("One row per size.")
    wrong: list[dict[str, int | str]] = value("Sizes without a right config.")
    elsewhere: dict[str, int] = value("Number of picks by GPU that are not listed.")


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


class PickDetail(Document, printed_by="show KERNEL SIZE"):
    """One size with all its configs, if one size matches."""

    document: Literal["detail"] = value("Distinguishes documents.", default="detail")
    pick: ListedPick = value("The pick of the size.")
    why: str = value("Reason why the next best config is not the pick, if that is faster; empty otherwise.")
    candidates: list[Candidate] = value("All configs: the pick, confirmed ones, others by time, failed ones.")
    keep_band: float = value("Slowdown against a rival that a proven pick may have.", "share")


def size_of(problem: records.Problem) -> dict[str, int | str]:
    """Return a problem size for a document. Recorded arguments that are no integers are words."""
    return {name: size if type(size) is int else str(size) for name, size in problem.shape.items()}


def change(ratio: float | None) -> float | None:
    """Return a ratio as a change: 1.03 is 0.03."""
    return None if ratio is None else ratio - 1


def all_in_use(rows: Iterable[ListedPick]) -> bool:
    """Return True if today's config is the pick wherever it was timed: the speedup over the default says more."""
    timed = [row.in_use for row in rows if row.speedup is not None or row.in_use]
    return bool(timed) and all(timed)


def _summary(kernel: str, gpu: str, picks: Sequence[ListedPick], wrong: int) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "gpu": gpu,
        "sizes": len(picks) + wrong,
        "speedup": mean(pick.speedup for pick in picks),
        "in_use": all_in_use(picks),
        "over_default": mean(pick.over_default for pick in picks),
    }


def _sorted(rows: Iterable[Any], sort: Sort, time: Any) -> list[Any]:
    """Return rows by gain, time or share of the peak; ``size`` keeps their order."""
    keys = {
        "speedup": lambda row: -(row.speedup or 0.0),
        "peak": lambda row: 2.0 if row.peak_share is None else row.peak_share,
        "time": time,
        "size": lambda row: 0,
    }
    return sorted(rows, key=keys[sort])


def make_overview(
    picks: Sequence[ListedPick],
    wrong: Mapping[tuple[str, str], int],
    database: str,
    triton: Iterable[str],
    sort: Sort = "size",
    top: int | None = None,
) -> Overview:
    """Summarize picks by kernel and GPU; ``wrong`` counts the sizes without a right config.

    Rows are sorted by ``size``: recorded kernels before those that come with fp8tune, then proven ones before quick
    ones, then the largest speedup.
    """
    groups: dict[tuple[str, str], list[ListedPick]] = {place: [] for place in wrong}
    for pick in picks:
        groups.setdefault((pick.kernel, pick.gpu), []).append(pick)
    rows = []
    for (kernel, gpu), group in groups.items():
        shares = [pick.peak_share for pick in group if pick.peak_share is not None]
        counts = Counter(pick.verdict for pick in group)
        counts[Verdict.WRONG] += wrong.get((kernel, gpu), 0)
        rows.append(
            KernelSummary(
                **_summary(kernel, gpu, group, counts[Verdict.WRONG]),
                peak_share=median(shares) if shares else None,
                verdicts={word: counts[word] for word in Verdict if counts[word]},
            )
        )
    trust = [*Verdict]
    rows.sort(key=lambda row: (-(row.over_default or 0.0), row.kernel))
    rows.sort(key=lambda row: (min(map(trust.index, row.verdicts)), row.in_use, -(row.speedup or 0.0)))
    rows.sort(key=lambda row: ":" not in row.kernel)
    rows = _sorted(rows, sort, lambda row: -sum(pick.time_us for pick in groups[row.kernel, row.gpu]))
    return Overview(database=database, triton=list(triton), kernels=rows[:top])


def make_pick_list(
    picks: Sequence[ListedPick],
    gpu: str,
    wrong: Sequence[dict[str, int | str]] = (),
    kernel: str = "",
    sort: Sort = "size",
    top: int | None = None,
) -> PickList:
    """List the picks of one kernel on one of its GPUs."""
    rows = [pick for pick in picks if pick.gpu == gpu]
    by_size = sorted(rows, key=_size_order)
    return PickList(
        **_summary(kernel or rows[0].kernel, gpu, rows, len(wrong)),
        picks=_sorted(by_size if sort == "size" else rows, sort, lambda pick: -pick.time_us)[:top],
        wrong=list(wrong) if top is None else [],
        elsewhere=Counter(pick.gpu for pick in picks if pick.gpu != gpu),
    )


def _size_order(pick: ListedPick) -> tuple[object, ...]:
    sizes = tuple((isinstance(size, str), size) for size in pick.size.values())
    return len(sizes), sizes, tuple(pick.attributes.values())


def make_detail(pick: ListedPick, explanation: Explanation) -> PickDetail:
    """Return one size with all its configs."""
    study = explanation.study
    roles = {"pick": study.pick.config, "today": study.today and study.today.config, "default": study.default}
    candidates = [
        Candidate.from_records(
            attempt,
            slower=change(attempt.slowdown),
            lower=change(attempt.interval and attempt.interval[0]),
            upper=change(attempt.interval and attempt.interval[1]),
            confirmed=attempt.stage is Stage.FINAL,
            roles=[role for role, config in roles.items() if config == attempt.config],
        )
        for attempt in explanation.attempts
    ]
    band = explanation.plan.keep_band
    return PickDetail(pick=pick, why=str(study.precedence), candidates=candidates, keep_band=band)


def overview(document: Overview, next_line: str = "") -> Screen:
    """Return the screen of all kernels: one row per kernel and GPU."""
    rows = document.kernels
    gpus = list(dict.fromkeys(short_gpu(row.gpu) for row in rows))
    where = listed(gpus) if len(gpus) > 1 else rows[0].gpu
    triton = f", Triton {listed(document.triton)}" if document.triton else ""
    kernels = counted(len({row.kernel for row in rows}), "kernel")
    title = f"{document.database}: {counted(sum(row.sizes for row in rows), 'pick')} of {kernels} on {where}{triton}"
    columns = [
        Column("kernel", lambda row: row.kernel, cut="start"),
        Column("gpu", lambda row: short_gpu(row.gpu) if len(gpus) > 1 else ""),
        number("sizes", lambda row: f"{row.sizes:,}"),
        number("speedup", lambda row: ratio(row.speedup, row.in_use)),
        number("over default", lambda row: ratio(row.over_default), leaves="before cuts"),
        number("% peak", lambda row: percent(row.peak_share), leaves="before cuts"),
        Column("verdicts", lambda row: ", ".join(f"{n} {word}" for word, n in row.verdicts.items()), cut="end"),
    ]
    if all(row.speedup == row.over_default for row in rows):  # today's config is the default everywhere
        columns = [column for column in columns if column.heading != "over default"]
    return Screen([title], columns, [next_line], rows)


def pick_list(document: PickList) -> Screen:
    """Return the screen of one kernel on one GPU."""
    rows = document.picks
    table, shared = pick_table(rows, document.wrong, over_default=document.in_use)
    count = f"{len(table.rows)} of " if len(table.rows) < document.sizes else ""
    title = f"{document.kernel} on {document.gpu}: {count}{counted(document.sizes, 'size')}"
    title += f" with {shared}" if shared else ""
    mean_line = ""
    if document.in_use and document.over_default:
        title += ", all in use"
        mean_line = f"speedup over the default: {ratio(document.over_default)} (geometric mean)"
    elif document.speedup:
        sources = listed(dict.fromkeys(row.today_from for row in rows if row.today_from))
        mean_line = f"{ratio(document.speedup)} over today's configs (geometric mean; from {sources})"
    others = ", ".join(f"{gpu} ({counted(count, 'size')})" for gpu, count in document.elsewhere.items())
    below = [*table.below, f"also on {others}: --device" if others else ""]
    return replace(table, above=[title, mean_line], below=below)


def pick_table(
    rows: Sequence[ListedPick], wrong: Sequence[dict[str, int | str]] = (), *, over_default: bool = False
) -> tuple[Screen, str]:
    """Return a table of picks, with the legend of their configs below it, and the sizes that all rows share.

    ``over_default`` is True if speedups are over the default, because all picks are in use.
    """
    sizes = [*(row.size for row in rows), *wrong]
    shared, dims = split_shared(sizes)
    _, attributes = split_shared([row.attributes for row in rows])
    names = ConfigNames.from_configs([row.config or {} for row in rows])
    columns = [number(dim, [str(size.get(dim, "-")) for size in sizes]) for dim in dims]
    for name in attributes if len(rows) > 1 else ():  # a single row shares nothing, but needs no column for it
        is_launch = name == "layout" and all(row.attributes[name].startswith(records.RECORDED) for row in rows)
        if not is_launch or len({pairs(size) for size in sizes}) < len(sizes):  # else its size names a launch
            texts = [short_dtype(layout(row.attributes[name])) or "-" for row in rows] + ["-"] * len(wrong)
            columns.append(Column("launch" if is_launch else name, texts, cut="end"))
    columns += [
        number("speedup", lambda row: ratio(row.over_default) if over_default else ratio(row.speedup, row.in_use)),
        number("time us", lambda row: microseconds(row.time_us)),
        Column("config", lambda row: names.short(row.config) if row.verdict != Verdict.WRONG else "-", cut="end"),
        number("% peak", lambda row: percent(row.peak_share), leaves="before cuts"),
        Column("verdict", lambda row: row.verdict),
        number("GB/s", lambda row: f"{row.gb_per_s:,.0f}" if row.gb_per_s else "-", wide=True),
        number("over default", lambda row: ratio(row.over_default), wide=True),
        number("next best %", lambda row: percent(row.next_best, 1), wide=True),
        number("noise %", lambda row: percent(row.noise, 2), wide=True),
        number("processes", lambda row: str(row.processes or "-"), wide=True),
        Column("timing", lambda row: row.timing if row.timing == records.GRAPH else "", wide=True),
    ]
    nothing = SimpleNamespace(**dict.fromkeys(ListedPick.model_fields) | {"verdict": Verdict.WRONG})
    return Screen([], columns, [names.legend], [*rows, *[nothing] * len(wrong)]), pairs(shared)


def detail(document: PickDetail, top: int | None = None) -> Screen:
    """Return the screen of one size: confirmed configs, some of the coarse pass, and why the pick won."""
    pick, timed = document.pick, [row for row in document.candidates if row.time_us is not None]
    rows = timed[: top or max(COARSE_LISTED, sum(row.confirmed for row in timed) + 1)]
    names = ConfigNames.from_configs([row.config or {} for row in rows], spelled=True)
    columns = [
        number("#", [str(place) for place in range(1, len(rows) + 1)]),
        Column("config", lambda row: names.short(row.config), cut="end"),
        number("time us", lambda row: microseconds(row.time_us)),
        number("slower", lambda row: "pick" if "pick" in row.roles else f"{percent(row.slower, 1)} %"),
        Column("interval", _interval, cut="end"),
    ]
    attributes = (layout(pick.attributes[name]) for name in ("routing", "layout", "dtype"))
    kind = ", ".join(short_dtype(text) for text in attributes if text not in USUAL)
    above = [
        f"{pick.kernel} {pairs(pick.size)}{f' ({kind})' if kind else ''} on {pick.gpu}",
        _gain(pick),
        f"{pick.verdict}: {_reason(document)}",
    ]
    more = f"({counted(len(timed) - len(rows), 'more config')}: --top {len(timed)})" if len(timed) > len(rows) else ""
    confirmed = f"confirmed in {counted(pick.processes, 'fresh process')}" if pick.processes else ""
    runs = ", ".join(filter(None, (confirmed, "timed in CUDA graphs" if pick.timing == records.GRAPH else "")))
    failed = Counter(row.status.replace("_", " ") for row in document.candidates if row.time_us is None)
    failures = f"failed: {', '.join(f'{count:,} {word}' for word, count in failed.items())} (--failed)"
    return Screen(
        above, columns, [names.legend, "  ".join(filter(None, (more, runs))), failures if failed else ""], rows
    )


def _interval(row: Candidate) -> str:
    text = "" if row.confirmed or "pick" in row.roles else "coarse pass only"
    if row.lower is not None and row.upper is not None:
        text = f"{percent(row.lower, 1)} to {percent(row.upper, 1)} %"
    role = "today's config" if "today" in row.roles else "default" if "default" in row.roles else ""
    return "  ".join(filter(None, (text, role)))


def _gain(pick: ListedPick) -> str:
    now = microseconds(pick.time_us)
    end = f"{now} us" + (f", {percent(pick.peak_share)} % of peak" if pick.peak_share is not None else "")
    gain = pick.over_default if pick.in_use else pick.speedup
    before = f"{microseconds(pick.time_us * gain)} -> {end}" if gain else end
    if pick.in_use:
        over = f"; {ratio(gain)} over the default" if gain else ""
        return f"in use ({pick.today_from}){over}: {before}"
    if gain:
        return f"{ratio(gain)} over today's config ({pick.today_from}): {before}"
    return end + ("; today's config was not timed" if pick.today is not None else "")


def _reason(document: PickDetail) -> str:
    pick, band, share = document.pick, percent(document.keep_band, 1), document.pick.next_best
    rival = ""
    if share is not None:
        why = f" ({document.why})" if document.why else ""
        rival = f"; the next best is {percent(abs(share), 1)} % {'slower' if share >= 0 else 'faster'}{why}"
    texts = {
        Verdict.PROVEN: f"no rival is over {band} % faster{rival}",
        Verdict.OPEN: f"noise may hide a rival that is over {band} % faster{rival}",
        Verdict.QUICK: f"coarse pass in one process{rival}; confirm it with fp8tune sweep",
        Verdict.PUBLISHED: f"reported by {pick.source}, not measured here",
        Verdict.STALE: f"this GPU runs other code, Triton or driver now{rival}; measure it again with fp8tune sweep",
    }
    return texts.get(pick.verdict, "no config gives the right output")
