"""First page: speedup and % of peak of each kernel on each device, verdicts, and every pick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fp8tune.records import Device, Kind
from fp8tune.report.charts import MEANINGS, VERDICTS, chart, colours, sized, whole_axis
from fp8tune.report.contents import (
    LISTED,
    Contents,
    Row,
    day,
    device_name,
    limit_note,
    place_columns,
    size_columns,
)
from fp8tune.report.parts import Chart, Column, Page, Part, percent, table
from fp8tune.stats.means import geomean, group_by, median


def page(contents: Contents) -> Page:
    """Return the first page."""
    return Page(
        "overview",
        "Overview",
        "Speedups of the best configs over today's configs, and how near they are to the peak of each device.",
        (_grid(contents), _verdicts(contents), _picks(contents), _devices(contents)),
    )


@dataclass(frozen=True)
class _Cell:
    """All sizes of a kernel on a device."""

    kernel: str
    device: str
    rows: Sequence[Row]

    def mean(self, name: str) -> float | None:
        """Return the geometric mean of an attribute over the picks that have it."""
        known = [value for row in self.rows if (value := getattr(row.pick, name))]
        return geomean(known) if known else None

    @property
    def peak_share(self) -> float | None:
        """Median share of the peak."""
        shares = [row.pick.ceiling_share for row in self.rows if row.pick.ceiling_share]
        return median(shares) if shares else None

    @property
    def label(self) -> str:
        """Text of the cell in the chart."""
        speedup, over_default, share = self.mean("speedup_ratio"), self.mean("default_ratio"), self.peak_share
        in_use = f"in use ({over_default:.2f}x)" if over_default else "in use"
        today = in_use if all(row.is_in_use for row in self.rows) else f"{speedup:.2f}x" if speedup else ""
        return ", ".join(filter(None, [today, f"{100 * share:.0f} %" if share else ""]))


def _grid(contents: Contents) -> Part:
    by_place = group_by(contents.rows, lambda row: (row.kernel, row.device))
    cells = [_Cell(kernel, device, rows) for (kernel, device), rows in sorted(by_place.items())]
    columns: list[Column[_Cell]] = [
        Column("kernel", "kernel", lambda cell: cell.kernel),
        Column("device", "device", lambda cell: cell.device),
        Column("sizes", "sizes", lambda cell: len(cell.rows)),
        Column("speedup", "speedup over today", lambda cell: cell.mean("speedup_ratio"), 2, unit="x"),
        Column("over_default", "over default", lambda cell: cell.mean("default_ratio"), 2, unit="x"),
        Column("share", "% of peak", lambda cell: percent(cell.peak_share), 0),
        Column("label", "label", lambda cell: cell.label, is_hidden=True),
        Column("disturbed", "disturbed", lambda cell: sum(bool(row.disturbance) for row in cell.rows)),
        Column("newest", "newest row", lambda cell: day(max(row.study.newest for row in cell.rows))),
    ]
    # a device with published rows only has empty cells, so it comes last
    labelled = {cell.device for cell in cells if cell.label}
    devices = sorted({cell.device for cell in cells}, key=lambda name: (name not in labelled, name))
    return Part(
        "grid",
        "Speedup and % of peak",
        "Geometric mean of the speedups over today's configs, and median % of peak: 100 % is the fastest that the "
        "device's memory or tensor cores can be. in use: today's configs are the picks; in brackets over the default.",
        table(columns, cells),
        _grid_chart(devices) if cells else None,
        "No timed results: fp8tune sweep fills the database.",
    )


def _grid_chart(devices: Sequence[str]) -> Chart:
    import altair as alt

    base = chart().encode(
        x=alt.X("device:N", title=None, sort=list(devices), axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("kernel:N", title=None),
        tooltip=["kernel:N", "device:N", "sizes:Q", "speedup:Q", "over_default:Q", "share:Q"],
    )
    scale = alt.Scale(domain=[0, 100], range=["#d4e6f4", "#4f97d3"])
    cells = base.mark_rect(stroke="currentColor", strokeOpacity=0.2, invalid="show").encode(
        color=alt.Color("share:Q", title="% of peak", scale=scale)
    )
    return sized(cells + base.mark_text(color="#000").encode(text="label:N"), "kernel", 24)


def _verdicts(contents: Contents) -> Part:
    counts = Counter((row.kernel, row.pick.verdict) for row in contents.rows)
    columns: list[Column[tuple[tuple[str, str], int]]] = [
        Column("kernel", "kernel", lambda item: item[0][0]),
        Column("verdict", "verdict", lambda item: item[0][1]),
        Column("sizes", "sizes", lambda item: item[1]),
    ]
    return Part(
        "verdicts",
        "Verdicts",
        " ".join(f"{word}: {meaning}." for word, meaning in MEANINGS.items()),
        table(columns, sorted(counts.items())),
        _verdict_chart([verdict for _, verdict in counts]) if counts else None,
    )


def _verdict_chart(present: Sequence[str]) -> Chart:
    import altair as alt

    bars = (
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
    )
    return sized(bars, "kernel", 24)


def _speedup(row: Row) -> str:
    speedup = row.pick.speedup_ratio
    return "in use" if row.is_in_use else f"{speedup:.2f}x" if speedup else "-"


PICKS: tuple[Column[Row], ...] = (
    *size_columns(lambda row: row),
    Column("speedup", "speedup", _speedup),
    Column("over_default", "over default", lambda row: row.pick.default_ratio, 2, unit="x"),
    Column("time", "time us", lambda row: row.study.choice.time_us, 1),
    Column("share", "% of peak", lambda row: percent(row.pick.ceiling_share), 0),
    Column("verdict", "verdict", lambda row: row.pick.verdict),
    Column("disturbance", "disturbed", lambda row: row.disturbance),
    *place_columns(lambda row: row),
    Column("config", "config", lambda row: str(row.study.pick.config or "")),
    Column("layout", "layout", lambda row: row.study.problem.input_layout),
    Column("dtype", "dtype", lambda row: row.study.problem.in_dtype),
    Column("newest", "measured", lambda row: day(row.study.newest)),
    Column("kind", "kind", lambda row: str(row.study.kind)),
    Column("check", "outputs", lambda row: row.check),
    Column("source", "source", lambda row: row.study.pick.source),
    Column("commit", "commit", lambda row: row.commit[:12]),
)


def _picks(contents: Contents) -> Part:
    notes = filter(None, (limit_note(len(contents.rows)), contents.note))
    return Part(
        "picks",
        "All picks",
        "One row per size and device. The kernel's name leads to every config that was tried. disturbed: other work on "
        "the host may have been timed (busy host), or the default differed from itself by more than the tie band.",
        table(PICKS, contents.rows[:LISTED], " ".join(notes)),
    )


def _devices(contents: Contents) -> Part:
    by_device = group_by(
        contents.rows, lambda row: (row.study.kind is Kind.PUBLISHED, row.study.device, row.study.kind)
    )
    places = sorted(by_device.items(), key=lambda item: (item[0][0], item[0][1].fingerprint, item[0][2]))
    columns: list[Column[tuple[tuple[bool, Device, Kind], list[Row]]]] = [
        Column("device", "device", lambda item: device_name(item[0][1])),
        Column("kind", "kind", lambda item: str(item[0][2])),
        *(_field(name) for name in ("arch", "uuid_hash", "driver", "runtime", "torch", "triton", "timing")),
        Column("sizes", "sizes", lambda item: len(item[1])),
        Column("oldest", "oldest row", lambda item: day(min(row.study.newest for row in item[1]))),
        Column("newest", "newest row", lambda item: day(max(row.study.newest for row in item[1]))),
    ]
    text = "Times are compared only within one row of this table: one GPU, driver, torch, Triton and way of timing."
    return Part("devices", "Devices", text, table(columns, places))


def _field(name: str) -> Column[tuple[tuple[bool, Device, Kind], list[Row]]]:
    return Column(name, name.replace("uuid_hash", "GPU"), lambda item: str(getattr(item[0][1], name))[:20])
