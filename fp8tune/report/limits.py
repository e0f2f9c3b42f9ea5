"""How near picks are to what the hardware can do: memory's rate, the tensor cores' rate, and both as a roofline."""

from __future__ import annotations

from fp8tune.ceiling import ceiling_share, gb_per_s
from fp8tune.records import is_recorded
from fp8tune.report.charts import BLUE, GREEN, WIDTH, chart
from fp8tune.report.contents import LISTED, Contents, Row, cut, named
from fp8tune.report.view import Column, Part, Picture, View, table


def view(found: Contents) -> View | None:
    """The limits of every measured row; None where nothing has a time and bytes."""
    known = [row for row in found.rows if row.study.bytes_moved]
    rows, left_out = known[:LISTED], cut(len(known))
    if not rows:
        return None
    return View(
        "limits",
        "Limits",
        "What stops each pick: the rate of memory, or that of the tensor cores. Both were measured on the device.",
        (_memory(rows, left_out), _roofline(rows, left_out), _shares(rows, left_out), _caches(rows, left_out)),
    )


def _columns() -> list[Column[Row]]:
    return [
        *named(lambda row: row),
        Column("time", "time, us", lambda row: row.study.choice.time_us, 1),
    ]


def _bytes(row: Row) -> int:
    return row.study.bytes_moved or 0


def _rate(row: Row) -> float:
    return gb_per_s(_bytes(row), row.study.choice.time_us)


def _ceiling(row: Row) -> float | None:
    return row.study.pick.ceiling_gb_per_s


def _memory(rows: list[Row], left_out: str) -> Part:
    columns: list[Column[Row]] = [
        *_columns(),
        Column("bytes", "bytes moved, MB", lambda row: _bytes(row) / 1e6, 1),
        Column("rate", "GB/s", _rate),
        Column("ceiling", "ceiling, GB/s", _ceiling),
        Column("least", "least time, us", _least_us, 1),
    ]
    return Part(
        "memory",
        "Time over bytes",
        "A dot a row; the lines are the least time at the ceiling of each device's memory. A dot at the line moves its "
        "bytes as fast as memory can; far to the left of the picture launching takes longer than moving.",
        table(columns, rows, left_out),
        _memory_chart(),
    )


def _least_us(row: Row) -> float | None:
    ceiling = _ceiling(row)
    return _bytes(row) / ceiling / 1e3 if ceiling else None


def _memory_chart() -> Picture:
    import altair as alt

    log = alt.Scale(type="log", nice=False, padding=8)
    x = alt.X("bytes:Q", title="bytes moved, MB", scale=log)
    dots = (
        chart()
        .mark_point(filled=True, size=26, opacity=0.75)
        .encode(
            x=x,
            y=alt.Y("time:Q", title="time, us", scale=log),
            color=alt.Color("kernel:N", title=None, scale=alt.Scale(scheme="tableau20"), legend=alt.Legend(columns=4)),
            shape=alt.Shape("device:N", title=None, legend=alt.Legend(columns=2)),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", "time:Q", alt.Tooltip("rate:Q", format=".0f", title="GB/s")],
        )
    )
    lines = (
        chart()
        .mark_line(strokeWidth=1.5, color="currentColor", opacity=0.7)
        .transform_filter("isValid(datum.least)")
        .encode(x=x, y=alt.Y("least:Q", scale=log), detail="ceiling:N")
    )
    return (lines + dots).properties(width=WIDTH, height=360)


def _roofline(rows: list[Row], left_out: str) -> Part:
    known = [row for row in rows if row.study.flops]
    columns: list[Column[Row]] = [
        *_columns(),
        Column("dtype", "dtype", lambda row: row.study.problem.in_dtype),
        Column("intensity", "operations a byte", _intensity, 1),
        Column("rate", "TFLOP/s", _tflops, 0),
        Column("roof", "roof, TFLOP/s", _roof, 0),
        Column("share", "of roof, %", _share_of_roof, 1),
    ]
    return Part(
        "roofline",
        "Roofline",
        "For kernels that multiply: their rate over the operations per byte moved. The line is the roof of a dtype: "
        "what memory gives, and from its bend on what a dense GEMM reached in the same sweep.",
        table(columns, known, left_out),
        _roofline_chart() if known else None,
        "No kernel here declares operations.",
    )


def _intensity(row: Row) -> float:
    return (row.study.flops or 0) / _bytes(row)


def _tflops(row: Row) -> float:
    return (row.study.flops or 0) / row.study.choice.time_us / 1e6


def _roof(row: Row) -> float | None:
    peak, ceiling = row.study.pick.peak_flop_per_s, _ceiling(row)
    roofs = [peak / 1e12] if peak else []
    roofs += [_intensity(row) * ceiling / 1e3] if ceiling else []
    return min(roofs, default=None)


def _share_of_roof(row: Row) -> float | None:
    roof = _roof(row)
    return 100 * _tflops(row) / roof if roof else None


def _roofline_chart() -> Picture:
    import altair as alt

    log = alt.Scale(type="log", nice=False, padding=8)
    x = alt.X("intensity:Q", title="operations a byte", scale=log)
    roofs = (
        chart()
        .mark_line(color="currentColor", opacity=0.6, strokeWidth=1.5)
        .transform_filter("isValid(datum.roof)")
        .encode(x=x, y=alt.Y("roof:Q", scale=log), detail=["device:N", "dtype:N"])
    )
    dots = (
        chart()
        .mark_point(filled=True, size=30, opacity=0.8)
        .encode(
            x=x,
            y=alt.Y("rate:Q", title="TFLOP/s", scale=log),
            color=alt.Color("kernel:N", title=None, legend=alt.Legend(columns=3)),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", alt.Tooltip("rate:Q", format=".0f"), alt.Tooltip("share:Q")],
        )
    )
    return (roofs + dots).properties(width=WIDTH, height=320)


def _shares(rows: list[Row], left_out: str) -> Part:
    known = [row for row in rows if row.ceiling_share is not None]
    columns: list[Column[Row]] = [
        *_columns(),
        Column("share", "of ceiling, %", lambda row: 100 * (row.ceiling_share or 0.0), 1),
        Column("bound", "bound by", lambda row: str(row.bound)),
        Column("verdict", "verdict", lambda row: row.verdict),
    ]
    return Part(
        "shares",
        "Share of the ceiling, row by row",
        "A tick a row. Rows far to the left have most to gain; the table sorts by the header one clicks.",
        table(columns, known, left_out),
        _shares_chart() if known else None,
        "No row has a ceiling: its device was not calibrated.",
    )


def _shares_chart() -> Picture:
    import altair as alt

    return (
        chart()
        .mark_tick(thickness=2, size=16)
        .encode(
            x=alt.X("share:Q", title="of ceiling, %"),
            y=alt.Y("kernel:N", title=None),
            color=alt.Color(
                "bound:N", title="bound by", scale=alt.Scale(domain=["memory", "compute"], range=[BLUE, GREEN])
            ),
            href="href:N",
            tooltip=["kernel:N", "shape:N", "device:N", alt.Tooltip("share:Q", format=".1f"), "verdict:N"],
        )
        .properties(width=WIDTH, height=alt.Step(20))
    )


def _caches(rows: list[Row], left_out: str) -> Part:
    """Rows whose bytes came faster than memory gives."""

    def share(row: Row) -> float | None:
        copy_gb_per_s = row.study.pick.copy_gb_per_s
        found = ceiling_share(row.study.choice.time_us, _bytes(row), copy_gb_per_s)
        return None if found is None or is_recorded(row.study.problem) else found.share

    cached = [row for row in rows if (share(row) or 0.0) > 1]
    columns: list[Column[Row]] = [
        *_columns(),
        Column("rate", "GB/s", _rate, 0),
        Column("copy", "copy, GB/s", lambda row: row.study.pick.copy_gb_per_s, 0),
        Column("cached", "from L2 at least, %", lambda row: 100 * (1 - 1 / (share(row) or 1.0)), 1),
    ]
    return Part(
        "caches",
        "Faster than a copy",
        "What such a row moves beyond the rate of a copy came from the L2 cache, or was read, which is faster than "
        "writing. A database holds no figures of a profiler, so this is a bound from times alone.",
        table(columns, cached, left_out),
        empty="No row is faster than a copy.",
    )
