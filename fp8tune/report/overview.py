"""How near each kernel is to the ceiling on each device, what is open, and what it was measured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fp8tune.records import Device, Kind
from fp8tune.report.charts import VERDICTS, WIDTH, chart, colours
from fp8tune.report.contents import LISTED, Contents, Row, cut, day, device_name, named
from fp8tune.report.view import Column, Part, Picture, View, table
from fp8tune.stats.means import group_by
from fp8tune.stats.study import Verdict
from fp8tune.studies import KernelSummary, pick_of, summarize


def view(found: Contents) -> View:
    """The first page."""
    return View(
        "overview",
        "Overview",
        "The best configs of each kernel, as a share of what the device can do at most (its ceiling).",
        (_grid(found), _verdicts(found), _picks(found), _devices(found), _counts(found)),
    )


@dataclass(frozen=True)
class _Cell:
    device: str
    of: KernelSummary


def _grid(found: Contents) -> Part:
    by_device = group_by(found.rows, lambda row: row.device)
    cells = [
        _Cell(device, of)
        for device, rows in sorted(by_device.items())
        for of in summarize(pick_of(row.study) for row in rows)
    ]
    cells.sort(key=lambda cell: (cell.of.kernel, cell.device))
    columns: list[Column[_Cell]] = [
        Column("kernel", "kernel", lambda cell: cell.of.kernel),
        Column("device", "device", lambda cell: cell.device),
        Column("share", "median share of ceiling, %", lambda cell: _percent(cell.of.ceiling_share), 1),
        Column("problems", "problems", lambda cell: cell.of.picks),
        Column("settled", "settled", lambda cell: cell.of.count(Verdict.PROVEN)),
        Column("open", "open", lambda cell: cell.of.count(Verdict.OPEN)),
        Column("quick", "screened only", lambda cell: cell.of.count(Verdict.QUICK)),
        Column("newest", "newest row", lambda cell: day(cell.of.newest)),
    ]
    return Part(
        "grid",
        "Share of the ceiling",
        "The median over a kernel's problems. 100 % is the fastest that memory, or the tensor cores, can be. "
        "Settled picks need no more measuring; open ones may lose more than the band within which a pick is kept.",
        table(columns, cells),
        _grid_chart() if cells else None,
        "No timed rows. What was only compiled, checked or published is counted below.",
    )


def _grid_chart() -> Picture:
    import altair as alt

    base = chart().encode(
        x=alt.X("device:N", title=None, axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("kernel:N", title=None),
        tooltip=["kernel:N", "device:N", alt.Tooltip("share:Q", title="share, %"), "problems:Q", "open:Q"],
    )
    scale = alt.Scale(domain=[0, 100], range=["#d4e6f4", "#4f97d3"])
    cells = base.mark_rect(stroke="currentColor", strokeOpacity=0.2, invalid="show").encode(
        color=alt.Color("share:Q", title="% of ceiling", scale=scale)
    )
    text = (
        base.mark_text(color="#000")
        .transform_filter("isValid(datum.share)")
        .encode(text=alt.Text("share:Q", format=".0f"))
    )
    return (cells + text).properties(width=alt.Step(150), height=alt.Step(24))


@dataclass(frozen=True)
class _Tally:
    kernel: str
    verdict: str
    problems: int


def _verdicts(found: Contents) -> Part:
    counted = Counter((row.kernel, row.verdict) for row in found.rows)
    tallies = [_Tally(kernel, of, count) for (kernel, of), count in sorted(counted.items())]
    columns: list[Column[_Tally]] = [
        Column("kernel", "kernel", lambda tally: tally.kernel),
        Column("verdict", "verdict", lambda tally: tally.verdict),
        Column("problems", "problems", lambda tally: tally.problems),
    ]
    return Part(
        "verdicts",
        "What is known of the picks",
        "certified: proven faster than all rivals. near-tie and kept-incumbent: within the band of the fastest. "
        "only: no other config was in the finals. ambiguous: it may lose more. unresolvable: too short to tell. "
        "quick: screened in one process.",
        table(columns, tallies),
        _verdict_chart([tally.verdict for tally in tallies]) if tallies else None,
    )


def _verdict_chart(present: Sequence[str]) -> Picture:
    import altair as alt

    return (
        chart()
        .mark_bar()
        .encode(
            x=alt.X("problems:Q", title="problems"),
            y=alt.Y("kernel:N", title=None),
            color=alt.Color("verdict:N", title=None, scale=colours(VERDICTS, present)),
            tooltip=["kernel:N", "verdict:N", "problems:Q"],
        )
        .properties(width=WIDTH, height=alt.Step(20))
    )


PICKS: tuple[Column[Row], ...] = (
    *named(lambda row: row),
    Column("layout", "layout", lambda row: row.study.problem.input_layout),
    Column("dtype", "dtype", lambda row: row.study.problem.in_dtype),
    Column("config", "pick", lambda row: str(row.study.pick.config or "")),
    Column("time", "time, us", lambda row: row.study.choice.time_us, 1),
    Column("share", "of ceiling, %", lambda row: _percent(row.ceiling_share), 1),
    Column("verdict", "verdict", lambda row: row.verdict),
    Column("newest", "measured", lambda row: day(row.study.newest)),
    Column("kind", "kind", lambda row: str(row.study.kind)),
    Column("source", "source", lambda row: row.study.pick.source),
    Column("commit", "commit", lambda row: row.commit[:12]),
    Column("driver", "driver", lambda row: row.study.device.driver),
    Column("torch", "torch", lambda row: row.study.device.torch),
    Column("triton", "Triton", lambda row: row.study.device.triton),
)


def _picks(found: Contents) -> Part:
    return Part(
        "picks",
        "All picks",
        "A row a problem and device. The kernel's name leads to everything that was tried for it.",
        table(PICKS, found.rows[:LISTED], " ".join(filter(None, (cut(len(found.rows)), found.left_out)))),
    )


@dataclass(frozen=True)
class _Place:
    device: Device
    kind: Kind
    rows: Sequence[Row]


def _devices(found: Contents) -> Part:
    by_device = group_by(found.rows, lambda row: (row.study.device, row.study.kind))
    places = [_Place(device, kind, rows) for (device, kind), rows in by_device.items()]
    places.sort(key=lambda place: (place.device.fingerprint, place.kind))
    columns: list[Column[_Place]] = [
        Column("device", "device", lambda place: device_name(place.device)),
        Column("arch", "arch", lambda place: place.device.arch),
        Column("kind", "kind", lambda place: str(place.kind)),
        Column("uuid", "one GPU of that name", lambda place: place.device.uuid_hash[:8]),
        Column("sms", "multiprocessors", lambda place: place.device.multiprocessors or None),
        Column("driver", "driver", lambda place: place.device.driver),
        Column("runtime", "runtime", lambda place: place.device.runtime),
        Column("torch", "torch", lambda place: place.device.torch),
        Column("triton", "Triton", lambda place: place.device.triton),
        Column("timing", "timing", lambda place: place.device.timing),
        Column("problems", "problems", lambda place: len(place.rows)),
        Column("oldest", "oldest row", lambda place: day(min(row.study.newest for row in place.rows))),
        Column("newest", "newest row", lambda place: day(max(row.study.newest for row in place.rows))),
    ]
    says = "Times are compared only within one row of this table: one GPU, driver, torch, Triton and way of timing."
    return Part("devices", "What it was measured with", says, table(columns, places))


def _counts(found: Contents) -> Part:
    counts = sorted(found.counts.items())
    columns: list[Column[tuple[tuple[str, Kind], int]]] = [
        Column("arch", "arch", lambda of: of[0][0]),
        Column("kind", "kind", lambda of: str(of[0][1])),
        Column("trials", "trials", lambda of: of[1]),
    ]
    return Part(
        "trials",
        "What the database holds",
        "A trial is one config of one problem. measured: timed. static: compiled and not run. interpreter: checked "
        "without a GPU. published: printed by others. simulated: drawn from a simulated clock.",
        table(columns, counts),
        empty="The database is empty: fp8tune sweep fills it.",
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
