"""A training step's grouped GEMMs, bf16 against FP8: part by part, over tokens and experts, weights once or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fp8tune.ceiling import ceiling_of
from fp8tune.choose.passes import LAYER, Choice, choices
from fp8tune.records import NamedInts
from fp8tune.report.charts import BLUE, GREEN, GREY, ORANGE, PINK, WIDTH, chart
from fp8tune.report.contents import Contents, device_name
from fp8tune.report.view import Column, Part, Picture, View, table
from fp8tune.stats.means import grouped
from fp8tune_kernels.catalog import GEMMS, PRECISIONS

FP8, AUTO, ONCE = PRECISIONS

PASSES = ("forward", "input gradient", "weight gradient")

KINDS = {"total": GREY, "faster": GREEN, "slower": ORANGE, "casts": PINK, "left to the bound": BLUE}
"""What a bar of the waterfall is -> its colour."""


@dataclass(frozen=True, eq=False)
class Step:
    """One layer on one device: its passes by precision."""

    device: str
    layer: NamedInts
    passes: Mapping[tuple[str, str], Choice]
    """(pass, precision) -> the choice."""
    gemms_us: Mapping[str, float] = field(default_factory=dict)
    """Pass -> its FP8 GEMM alone, on operands quantized before."""

    @property
    def name(self) -> str:
        """What the picture's list calls it."""
        return f"{self.layer} on {self.device}"

    def bf16_us(self, name: str) -> float | None:
        """Of one pass by torch's bf16 GEMM."""
        found = (self.passes.get((name, precision)) for precision in PRECISIONS)
        return next((choice.bf16_us for choice in found if choice is not None and choice.bf16_us is not None), None)

    def time_us(self, name: str, precision: str) -> float | None:
        """Of one pass by the method that is picked; the weight gradient does not read weights, so *once* is *auto*."""
        choice = self.passes.get((name, precision))
        if choice is None and precision == ONCE and name == PASSES[-1]:
            choice = self.passes.get((name, AUTO))
        return None if choice is None else choice.study.choice.time_us

    def total_us(self, precision: str | None) -> float | None:
        """Of all passes, None for bf16; None where a pass was not measured."""
        times = [self.bf16_us(name) if precision is None else self.time_us(name, precision) for name in PASSES]
        return None if None in times else math.fsum(time for time in times if time is not None)

    def speedup(self, precision: str) -> float | None:
        """Over bf16."""
        bf16, own = self.total_us(None), self.total_us(precision)
        return bf16 / own if bf16 is not None and own is not None else None

    @property
    def bound_us(self) -> float | None:
        """The least time of the FP8 passes: bytes at the ceiling or operations at the peak, whichever takes longer."""
        found = [self.passes.get((name, FP8)) for name in PASSES]
        known = [(c.study.choice.time_us, ceiling_of(c.study)) for c in found if c is not None]
        least = [time_us * ceiling.share for time_us, ceiling in known if ceiling]
        return math.fsum(least) if len(least) == len(PASSES) else None


def steps(found: Contents) -> list[Step]:
    """A step a layer and device."""
    made = choices(row.study for row in found.rows)
    alone = {
        (row.device, row.kernel, _sizes(row.study.problem.shape)): row
        for row in found.rows
        if row.kernel in GEMMS and row.study.problem.in_dtype.startswith("float8")
    }

    def place(choice: Choice) -> tuple[str, NamedInts, str]:
        return device_name(choice.study.device), choice.layer, choice.study.problem.routing

    known = []
    for (device, layer, _), of_layer in grouped(made, place).items():
        passes = {(choice.of_pass, choice.precision): choice for choice in reversed(of_layer)}
        gemms = {name: alone.get((device, *gemm)) for name, gemm in _gemms(layer).items()}
        times_us = {name: row.study.choice.time_us for name, row in gemms.items() if row is not None}
        known.append(Step(device, layer, passes, times_us))
    return known


def _gemms(layer: NamedInts) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Pass -> the kernel of its GEMM and its sizes M, N, K, G there: the input gradient contracts N."""
    rows, contraction = GEMMS
    M, N, K, G = _sizes(layer)
    return dict(zip(PASSES, ((rows, (M, N, K, G)), (rows, (M, K, N, G)), (contraction, (M, N, K, G))), strict=True))


def _sizes(shape: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(shape[dim] for dim in LAYER)


def view(found: Contents) -> View | None:
    """None where no pass of a step was measured."""
    known = steps(found)
    if not known:
        return None
    return View(
        "step",
        "The step",
        "fp8_grouped_mm multiplies three times a step: forward, and for the gradients of the input and the weights. "
        "Times are of whole passes with their casts, each measured alone.",
        (_waterfall(known), _map(known), _methods(known)),
    )


@dataclass(frozen=True)
class _Bar:
    layer: str
    order: int
    part: str
    begin_us: float
    end_us: float
    kind: str


def _bars(step: Step) -> Iterator[_Bar]:
    """bf16, what FP8 saves in each multiplication and costs in casts, FP8, and what is left to the bound."""
    bf16, fp8 = step.total_us(None), step.total_us(FP8)
    if bf16 is None or fp8 is None:
        return
    yield _Bar(step.name, 0, "bf16", 0.0, bf16, "total")
    at = bf16
    for number, name in enumerate(PASSES):
        whole, before = step.time_us(name, FP8) or 0.0, step.bf16_us(name) or 0.0
        multiplied = step.gemms_us.get(name, whole)
        for order, part, change in (
            (2 * number + 1, name, multiplied - before),
            (2 * number + 2, f"{name}, casts", whole - multiplied),
        ):
            kind = "casts" if order % 2 == 0 else "faster" if change < 0 else "slower"
            if change:
                yield _Bar(step.name, order, part, at, at + change, kind)
            at += change
    yield _Bar(step.name, 7, "FP8", 0.0, fp8, "total")
    once = step.total_us(ONCE)
    if once is not None:
        yield _Bar(step.name, 8, "weights quantized once", 0.0, once, "total")
    if step.bound_us is not None:
        yield _Bar(step.name, 9, "to the bound", step.bound_us, fp8, "left to the bound")
        yield _Bar(step.name, 10, "bound", 0.0, step.bound_us, "total")


def _waterfall(known: Sequence[Step]) -> Part:
    bars = [bar for step in known for bar in _bars(step)]
    columns: list[Column[_Bar]] = [
        Column("layer", "layer", lambda bar: bar.layer),
        Column("order", "order", lambda bar: bar.order, is_hidden=True),
        Column("part", "part", lambda bar: bar.part),
        Column("begin", "from, us", lambda bar: bar.begin_us, 0),
        Column("end", "to, us", lambda bar: bar.end_us, 0),
        Column("kind", "kind", lambda bar: bar.kind),
    ]
    return Part(
        "waterfall",
        "From bf16 to FP8 and to the bound",
        "Each pass shows what FP8 saves where it multiplies, and what its casts cost: the whole pass less its GEMM "
        "alone. The bound is the least that the FP8 passes can take: their bytes at the ceiling, or their operations "
        "at the peak. Choose a layer below the picture.",
        table(columns, bars),
        _waterfall_chart(list(dict.fromkeys(bar.layer for bar in bars))) if bars else None,
        "No layer has all three passes in bf16 and FP8.",
    )


def _waterfall_chart(layers: Sequence[str]) -> Picture:
    import altair as alt

    layer = alt.param(name="layer", value=layers[0], bind=alt.binding_select(options=list(layers), name="layer "))
    base = (
        chart()
        .transform_filter("datum.layer == layer")
        .encode(y=alt.Y("part:N", title=None, sort=alt.EncodingSortField("order", op="min")))
    )
    scale = alt.Scale(domain=list(KINDS), range=list(KINDS.values()))
    bars = base.mark_bar().encode(
        x=alt.X("begin:Q", title="us"),
        x2="end:Q",
        color=alt.Color("kind:N", title=None, scale=scale),
        tooltip=["part:N", "begin:Q", "end:Q"],
    )
    return bars.add_params(layer).properties(width=WIDTH - 60, height=alt.Step(26))


@dataclass(frozen=True)
class _Place:
    step: Step
    plane: tuple[float, float, float] | None

    @property
    def begins(self) -> float | None:
        """Experts up to which FP8 pays at these tokens, by the fitted plane."""
        if self.plane is None or abs(self.plane[2]) < 1e-6:
            return None
        a, b, c = self.plane
        experts = math.exp(max(-20.0, min(20.0, -(a + b * math.log(self.step.layer["M"])) / c)))
        return experts if 1 <= experts <= 1024 else None


def _map(known: Sequence[Step]) -> Part:
    timed = [step for step in known if step.speedup(FP8) is not None]
    plane = _plane([(step.layer["M"], step.layer["G"], step.speedup(FP8) or 1.0) for step in timed])
    places = [_Place(step, plane) for step in timed]
    columns: list[Column[_Place]] = [
        Column("device", "device", lambda place: place.step.device),
        Column("layer", "layer", lambda place: str(place.step.layer)),
        Column("rows", "rows of tokens", lambda place: place.step.layer["M"]),
        Column("experts", "experts", lambda place: place.step.layer["G"]),
        Column("bf16", "bf16, us", lambda place: place.step.total_us(None), 0),
        Column("fp8", "FP8, us", lambda place: place.step.total_us(FP8), 0),
        Column("speedup", "FP8 over bf16", lambda place: place.step.speedup(FP8), 2),
        Column("auto", "best of each pass", lambda place: place.step.speedup(AUTO), 2),
        Column("once", "weights once", lambda place: place.step.speedup(ONCE), 2),
        Column("begins", "experts where FP8 stops paying", lambda place: place.begins, 0),
    ]
    return Part(
        "map",
        "Where FP8 pays",
        "A dot a layer, with bf16's time over FP8's. The line is where a plane, fitted to the logarithms of all dots, "
        "says 1: on one side of it FP8 pays. Few rows for many experts make casts of weights weigh.",
        table(columns, places),
        _map_chart() if places else None,
        "No layer has all three passes in bf16 and FP8.",
    )


def _plane(points: Sequence[tuple[int, int, float]]) -> tuple[float, float, float] | None:
    """log speedup = a + b log rows + c log experts, by least squares; None for too few or all alike."""
    if len({point[0] for point in points}) < 2 or len({point[1] for point in points}) < 2 or len(points) < 4:
        return None
    rows, experts, speedups = np.log(np.array(points, dtype=float)).T
    found, *_ = np.linalg.lstsq(np.stack([np.ones_like(rows), rows, experts], axis=1), speedups)
    a, b, c = map(float, found)
    return a, b, c


def _map_chart() -> Picture:
    import altair as alt

    log = alt.Scale(type="log", base=2, nice=False, padding=20)
    x = alt.X("rows:Q", title="rows of tokens", scale=log)
    y = alt.Y("experts:Q", title="experts", scale=log)
    dots = (
        chart()
        .mark_point(filled=True, size=170, opacity=0.85)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "speedup:Q",
                title="bf16 over FP8",
                scale=alt.Scale(domain=[0.6, 1.0, 1.6], range=[ORANGE, "#b8b8b8", BLUE], clamp=True),
            ),
            tooltip=["layer:N", "device:N", "bf16:Q", "fp8:Q", "speedup:Q", "once:Q"],
        )
    )
    text = chart().mark_text(dy=-14, fontSize=9).encode(x=x, y=y, text=alt.Text("speedup:Q", format=".2f"))
    line = (
        chart()
        .mark_line(color="currentColor", strokeDash=[5, 4])
        .transform_filter("isValid(datum.begins)")
        .encode(x=x, y=alt.Y("begins:Q", scale=log))
    )
    return (line + dots + text).properties(width=WIDTH, height=340)


@dataclass(frozen=True)
class _Method:
    step: Step
    choice: Choice
    method: str
    time_us: float


def _methods(known: Sequence[Step]) -> Part:
    rows = [
        _Method(step, choice, method, time_us)
        for step in known
        for choice in step.passes.values()
        for method, time_us in choice.times_us.items()
    ]
    columns: list[Column[_Method]] = [
        Column("layer", "layer", lambda row: row.step.name),
        Column("pass", "pass", lambda row: row.choice.of_pass),
        Column("precision", "precision", lambda row: row.choice.precision),
        Column("method", "method", lambda row: row.method),
        Column("time", "time, us", lambda row: row.time_us, 1),
        Column("bf16", "bf16 by torch, us", lambda row: row.choice.bf16_us, 1),
        Column("is_pick", "picked", lambda row: "yes" if row.method == row.choice.method else ""),
    ]
    says = "Every method of every pass, with its casts. The precision says which methods may be picked."
    return Part("methods", "All methods", says, table(columns, rows))
