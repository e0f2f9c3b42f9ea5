"""First page: speedup and % of peak of each kernel on each device, verdicts, and every pick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fp8tune.records import Device, Kind
from fp8tune.report.charts import MEANINGS, VERDICTS, chart, colours, whole_axis
from fp8tune.report.contents import (
    LISTED,
    Contents,
    Row,
    day,
    device_name,
    limit_note,
    mean_over_default,
    mean_speedup,
    place_columns,
    size_columns,
)
from fp8tune.report.parts import Chart, Column, Page, Part, percent, table
from fp8tune.stats.means import group_by, median


def page(contents: Contents) -> Page:
    """Return the first page."""
    return Page(
        "overview",
        "Overview",
        "Speedups of the best configs over today's configs, and how near they are to the peak of each device.",
        (_grid(contents), _verdicts(contents), _picks(contents), _devices(contents), _counts(contents)),
    )


@dataclass(frozen=True)
class _Cell:
    kernel: str
    device: str
    rows: Sequence[Row]

    @property
    def peak_share(self) -> float | None:
        shares = [row.peak.share for row in self.rows if row.peak]
        return median(shares) if shares else None

    @property
    def label(self) -> str:
        """Text of the cell in the chart."""
        speedup, share = mean_speedup(self.rows), self.peak_share
        texts = ["in use" if all(row.is_in_use for row in self.rows) else speedup and f"{speedup:.2f}x"]
        return ", ".join(filter(None, [*texts, f"{100 * share:.0f} %" if share is not None else None]))


def _grid(contents: Contents) -> Part:
    by_place = group_by(contents.rows, lambda row: (row.kernel, row.device))
    cells = [_Cell(kernel, device, rows) for (kernel, device), rows in sorted(by_place.items())]
    columns: list[Column[_Cell]] = [
        Column("kernel", "kernel", lambda cell: cell.kernel),
        Column("device", "device", lambda cell: cell.device),
        Column("sizes", "sizes", lambda cell: len(cell.rows)),
        Column("speedup", "speedup over today", lambda cell: mean_speedup(cell.rows), 2, unit="x"),
        Column("over_default", "over default", lambda cell: mean_over_default(cell.rows), 2, unit="x"),
        Column("share", "% of peak", lambda cell: percent(cell.peak_share), 0),
        Column("label", "label", lambda cell: cell.label, is_hidden=True),
        *(_count_column(verdict) for verdict in VERDICTS if any(row.verdict == verdict for row in contents.rows)),
        Column("disturbed", "disturbed", lambda cell: sum(bool(row.disturbance) for row in cell.rows)),
        Column("newest", "newest row", lambda cell: day(max(row.study.newest for row in cell.rows))),
    ]
    # a device with published rows only has empty cells, so it comes last
    devices = sorted({cell.device for cell in cells}, key=lambda name: (not _has_labels(cells, name), name))
    return Part(
        "grid",
        "Speedup and % of peak",
        "Geometric mean of the speedups over today's configs (in use: today's configs are the picks), and median % of "
        "peak: 100 % is the fastest that the device's memory or tensor cores can be.",
        table(columns, cells),
        _grid_chart(devices) if cells else None,
        "No timed rows. Compiled, checked and published rows are counted below.",
    )


def _has_labels(cells: Sequence[_Cell], device: str) -> bool:
    return any(cell.label for cell in cells if cell.device == device)


def _count_column(verdict: str) -> Column[_Cell]:
    return Column(verdict, verdict, lambda cell: sum(row.verdict == verdict for row in cell.rows))


def _grid_chart(devices: Sequence[str]) -> Chart:
    import altair as alt

    base = chart().encode(
        x=alt.X("device:N", title=None, sort=list(devices), axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("kernel:N", title=None),
        tooltip=[
            "kernel:N",
            "device:N",
            "sizes:Q",
            alt.Tooltip("speedup:Q", format=".3f"),
            alt.Tooltip("over_default:Q", format=".3f"),
            alt.Tooltip("share:Q", title="% of peak", format=".1f"),
        ],
    )
    scale = alt.Scale(domain=[0, 100], range=["#d4e6f4", "#4f97d3"])
    cells = base.mark_rect(stroke="currentColor", strokeOpacity=0.2, invalid="show").encode(
        color=alt.Color("share:Q", title="% of peak", scale=scale)
    )
    return (cells + base.mark_text(color="#000").encode(text="label:N")).properties(
        width="container", height=alt.Step(24)
    )


@dataclass(frozen=True)
class _Tally:
    kernel: str
    verdict: str
    sizes: int


def _verdicts(contents: Contents) -> Part:
    counts = Counter((row.kernel, row.verdict) for row in contents.rows)
    tallies = [_Tally(kernel, verdict, count) for (kernel, verdict), count in sorted(counts.items())]
    columns: list[Column[_Tally]] = [
        Column("kernel", "kernel", lambda tally: tally.kernel),
        Column("verdict", "verdict", lambda tally: tally.verdict),
        Column("sizes", "sizes", lambda tally: tally.sizes),
    ]
    return Part(
        "verdicts",
        "Verdicts",
        " ".join(f"{word}: {meaning}." for word, meaning in MEANINGS.items()),
        table(columns, tallies),
        _verdict_chart([tally.verdict for tally in tallies]) if tallies else None,
    )


def _verdict_chart(present: Sequence[str]) -> Chart:
    import altair as alt

    return (
        chart()
        .mark_bar()
        .encode(
            x=alt.X("sizes:Q", title="sizes", axis=whole_axis()),
            y=alt.Y("kernel:N", title=None),
            color=alt.Color("verdict:N", title=None, scale=colours(VERDICTS, present)),
            order=alt.Order("rank:Q"),
            tooltip=["kernel:N", "verdict:N", "sizes:Q"],
        )
        .transform_calculate(rank=f"indexof({list(VERDICTS)!r}, datum.verdict)")
        .properties(width="container", height=alt.Step(24))
    )


def _same(row: Row) -> Row:
    return row


PICKS: tuple[Column[Row], ...] = (
    *size_columns(_same),
    Column("speedup", "speedup", lambda row: "in use" if row.is_in_use else _times(row.speedup)),
    Column("over_default", "over default", lambda row: row.over_default, 2, unit="x"),
    Column("time", "time us", lambda row: row.study.choice.time_us, 1),
    Column("share", "% of peak", lambda row: percent(row.peak.share) if row.peak else None, 0),
    Column("verdict", "verdict", lambda row: row.verdict),
    Column("disturbance", "disturbed", lambda row: row.disturbance),
    *place_columns(_same),
    Column("config", "config", lambda row: str(row.study.pick.config or "")),
    Column("layout", "layout", lambda row: row.study.problem.input_layout),
    Column("dtype", "dtype", lambda row: row.study.problem.in_dtype),
    Column("newest", "measured", lambda row: day(row.study.newest)),
    Column("kind", "kind", lambda row: str(row.study.kind)),
    Column("source", "source", lambda row: row.study.pick.source),
    Column("commit", "commit", lambda row: row.commit[:12]),
    Column("driver", "driver", lambda row: row.study.device.driver),
    Column("torch", "torch", lambda row: row.study.device.torch),
    Column("triton", "Triton", lambda row: row.study.device.triton),
)


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def _picks(contents: Contents) -> Part:
    notes = filter(None, (limit_note(len(contents.rows)), contents.note))
    return Part(
        "picks",
        "All picks",
        "One row per size and device. The kernel's name leads to every config that was tried. disturbed: other work on "
        "the host may have been timed (busy host), or the default differed from itself by more than the tie band.",
        table(PICKS, contents.rows[:LISTED], " ".join(notes)),
    )


@dataclass(frozen=True)
class _Place:
    device: Device
    kind: Kind
    rows: Sequence[Row]


def _devices(contents: Contents) -> Part:
    by_device = group_by(contents.rows, lambda row: (row.study.device, row.study.kind))
    places = [_Place(device, kind, rows) for (device, kind), rows in by_device.items()]
    places.sort(key=lambda place: (place.kind is Kind.PUBLISHED, place.device.fingerprint, place.kind))
    columns: list[Column[_Place]] = [
        Column("device", "device", lambda place: device_name(place.device)),
        Column("arch", "arch", lambda place: place.device.arch),
        Column("kind", "kind", lambda place: str(place.kind)),
        Column("uuid", "GPU", lambda place: place.device.uuid_hash[:8]),
        Column("sms", "multiprocessors", lambda place: place.device.multiprocessors or None),
        Column("driver", "driver", lambda place: place.device.driver),
        Column("runtime", "runtime", lambda place: place.device.runtime),
        Column("torch", "torch", lambda place: place.device.torch),
        Column("triton", "Triton", lambda place: place.device.triton),
        Column("timing", "timing", lambda place: place.device.timing),
        Column("sizes", "sizes", lambda place: len(place.rows)),
        Column("oldest", "oldest row", lambda place: day(min(row.study.newest for row in place.rows))),
        Column("newest", "newest row", lambda place: day(max(row.study.newest for row in place.rows))),
    ]
    text = "Times are compared only within one row of this table: one GPU, driver, torch, Triton and way of timing."
    return Part("devices", "Devices", text, table(columns, places))


def _counts(contents: Contents) -> Part:
    columns: list[Column[tuple[tuple[str, Kind], int]]] = [
        Column("arch", "arch", lambda item: item[0][0]),
        Column("kind", "kind", lambda item: str(item[0][1])),
        Column("trials", "trials", lambda item: item[1]),
    ]
    return Part(
        "trials",
        "Trials in the database",
        "A trial is one config on one size. measured: timed. static: compiled, not run. interpreter: checked without a "
        "GPU. published: reported by others. simulated: drawn from a simulated clock.",
        table(columns, sorted(contents.counts.items())),
        empty="The database is empty: fp8tune sweep fills it.",
    )
