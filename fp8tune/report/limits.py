"""Distance of the picks from the limits of the hardware: % of peak, and a roofline."""

from __future__ import annotations

from fp8tune.ceiling import gb_per_s
from fp8tune.report.charts import BLUE, GREEN, chart, disturbed_mark, sized
from fp8tune.report.contents import LISTED, Contents, Row, limit_note, place_columns, size_columns
from fp8tune.report.parts import Chart, Column, Page, Part, percent, table


def page(contents: Contents) -> Page | None:
    """Return the page; None if no row has a time and a number of bytes."""
    known = [row for row in contents.rows if row.study.bytes_moved]
    rows, note = known[:LISTED], limit_note(len(known))
    if not rows:
        return None
    return Page(
        "limits",
        "Limits",
        "Memory bandwidth or tensor cores limit each pick. Both were measured on the device.",
        (_shares(rows, note), _roofline(rows, note)),
    )


def _columns() -> list[Column[Row]]:
    return [
        *size_columns(lambda row: row),
        Column("time", "time us", lambda row: row.study.choice.time_us, 1),
        *place_columns(lambda row: row),
        Column("quality", "measured", lambda row: "disturbed" if row.disturbance else "undisturbed"),
    ]


def _bytes(row: Row) -> int:
    return row.study.bytes_moved or 0


def _intensity(row: Row) -> float:
    return (row.study.flops or 0) / _bytes(row)


def _roof(row: Row) -> float | None:
    compute, bandwidth = row.study.pick.peak_flop_per_s, row.study.pick.ceiling_gb_per_s
    roofs = [compute / 1e12] if compute else []
    roofs += [_intensity(row) * bandwidth / 1e3] if bandwidth else []
    return min(roofs, default=None)


def _roofline(rows: list[Row], note: str) -> Part:
    known = [row for row in rows if row.study.flops]
    columns: list[Column[Row]] = [
        *_columns(),
        Column("dtype", "dtype", lambda row: row.study.problem.in_dtype),
        Column("intensity", "operations per byte", _intensity, 1),
        Column("rate", "TFLOP/s", lambda row: (row.study.flops or 0) / row.study.choice.time_us / 1e6, 0),
        Column("roof", "roof, TFLOP/s", _roof, 0),
    ]
    return Part(
        "roofline",
        "Roofline",
        "For kernels that multiply: operations per second over operations per byte moved. The line is the roof of a "
        "dtype: memory bandwidth up to its bend, then the rate that a dense GEMM reached in the same sweep.",
        table(columns, known, note),
        _roofline_chart() if known else None,
        "No kernel here declares operations.",
    )


def _roofline_chart() -> Chart:
    import altair as alt

    log = alt.Scale(type="log", nice=False, padding=8)
    x = alt.X("intensity:Q", title="operations per byte", scale=log)
    roofs = (
        chart()
        .mark_line(color="currentColor", opacity=0.6, strokeWidth=1.5)
        .transform_filter("isValid(datum.roof)")
        .encode(x=x, y=alt.Y("roof:Q", scale=log), detail=["device:N", "dtype:N"])
    )
    marks = (
        chart()
        .mark_point(filled=True, size=30, opacity=0.8)
        .encode(
            x=x,
            y=alt.Y("rate:Q", title="TFLOP/s", scale=log),
            color=alt.Color("kernel:N", title=None, legend=alt.Legend(columns=3)),
            shape=disturbed_mark(),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", "rate:Q", "roof:Q", "quality:N"],
        )
    )
    return (roofs + marks).properties(width="container", height=400)


def _shares(rows: list[Row], note: str) -> Part:
    known = [row for row in rows if row.pick.ceiling_share]
    columns: list[Column[Row]] = [
        *_columns(),
        Column("share", "% of peak", lambda row: percent(row.pick.ceiling_share), 1),
        Column("speedup", "speedup over today", lambda row: row.pick.speedup_ratio, 2, unit="x"),
        Column("bytes", "bytes moved, MB", lambda row: _bytes(row) / 1e6, 1),
        Column("rate", "GB/s", lambda row: gb_per_s(_bytes(row), row.study.choice.time_us), 0),
        Column("bound", "bound by", lambda row: row.pick.bound or ""),
        Column("verdict", "verdict", lambda row: row.pick.verdict),
    ]
    return Part(
        "shares",
        "% of peak of each size",
        "Each mark is a size; crosses were measured under disturbance. Sizes at the left have most to gain.",
        table(columns, known, note),
        _shares_chart() if known else None,
        "No row has a known peak: its device was not calibrated.",
    )


def _shares_chart() -> Chart:
    import altair as alt

    bound = alt.Scale(domain=["memory", "compute"], range=[BLUE, GREEN])
    marks = (
        chart()
        .mark_point(filled=True, size=34, opacity=0.7)
        .encode(
            x=alt.X("share:Q", title="% of peak"),
            y=alt.Y("kernel:N", title=None),
            color=alt.Color("bound:N", title="bound by", scale=bound),
            shape=disturbed_mark(),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", "share:Q", "speedup:Q", "verdict:N", "quality:N"],
        )
    )
    return sized(marks, "kernel", 22)
