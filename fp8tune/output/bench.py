"""Document, screens and progress of ``bench``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8tune.bench.run import Compiled, Row
from fp8tune.output.documents import Document, value
from fp8tune.output.progress import Display
from fp8tune.output.show import size_of
from fp8tune.output.tables import Column, Screen, number, speedups
from fp8tune.output.text import counted, layout, listed, microseconds, pairs, ratio, split_shared
from fp8tune.stats.means import geomean

SMALL_SHARE = 0.01
"""Parts of a step that take less are shown as one."""


class BenchContender(Document):
    """One implementation on one size."""

    name: str = value("Name: fp8tune and its variants, torch, torch.compile, torchao, sonicmoe or others.")
    time_us: float | None = value("Time of one launch or step; null if it was not timed.", "us")
    speedup: float | None = value("Its time over that of fp8tune; null if either is wrong or has no time.", "x")
    is_wrong: bool = value("True if its output differs, so that it is excluded from all ratios.")
    reason: str = value("Reason why it was not timed; empty otherwise.")
    sqnr_db: dict[str, float] = value("Signal-to-noise ratio of each result in dB, of its worst part; operations only.")
    peak_bytes: int | None = value("Memory that a step allocates at its peak, beside the inputs.", "bytes")


class BenchPart(Document):
    """One kernel launch of a step of fp8tune."""

    kernel: str = value("Name of the GPU kernel.")
    time_us: float = value("Time on the GPU, from a profile.", "us")


class BenchSize(Document):
    """All contenders on one size."""

    label: str = value("Name of the size in its shape set; empty if it has none.")
    size: dict[str, int | str] = value("Problem size by dimension.")
    routing: str = value("How rows spread over groups; none for a kernel without groups.")
    layout: str = value("Layout of the input.")
    dtype: str = value("Dtype of the input.")
    config: dict[str, int] | None = value("Launch config of fp8tune's kernel; null for operations.")
    tflops: float | None = value("Speed of fp8tune in TFLOP/s; null if the kernel declares no operations.")
    gb_per_s: float | None = value("Rate of fp8tune, counting the least bytes.", "GB/s")
    contenders: list[BenchContender] = value("Contenders, fp8tune first.")
    parts: list[BenchPart] = value("Launches of a step of fp8tune in their order; empty without a profile.")


class BenchSubject(Document):
    """One kernel or operation."""

    name: str = value("Name of the kernel or operation.")
    title: str = value("What is timed.")
    is_emulated: bool = value("True if this GPU has no hardware for it, so that times say nothing about the recipe.")
    means: dict[str, float] = value("Geometric mean of the speedups over each contender.", "x")
    sizes: list[BenchSize] = value("Sizes, in the order of the shape set.")


class BenchReport(Document, printed_by="bench"):
    """Everything that one run of bench timed."""

    gpu: str = value("Name of the GPU.")
    arch: str = value("Architecture of the GPU.")
    torch: str = value("Version of torch.")
    triton: str = value("Version of Triton.")
    subjects: list[BenchSubject] = value("Kernels or operations.")


def make_report(rows: Sequence[Row]) -> BenchReport:
    """Return the rows of a run, at least one, as a document."""
    device = rows[0].device
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.subject.reference, []).append(row)
    subjects = [_subject(group) for group in groups.values()]
    return BenchReport.from_records(device, gpu=device.name or device.arch, subjects=subjects)


def _subject(rows: Sequence[Row]) -> BenchSubject:
    subject = rows[0].subject
    ratios = {name: [ratio for row in rows if (ratio := row.speedup(name))] for name in subject.names[1:]}
    return BenchSubject.from_records(
        subject.operation,
        is_emulated=subject.operation.is_emulated(rows[0].device.arch),
        means={name: geomean(values) for name, values in ratios.items() if values},
        sizes=[_size(row) for row in rows],
    )


def _size(row: Row) -> BenchSize:
    return BenchSize.from_records(
        row.size,
        row,
        size=size_of(row.size),
        layout=row.size.input_layout,
        dtype=row.size.in_dtype,
        contenders=[
            BenchContender.from_records(cell, cell.check, name=name, speedup=row.speedup(name))
            for name, cell in row.cells.items()
        ],
        parts=list(map(BenchPart.from_records, row.ours.check.parts)),
    )


def screens(report: BenchReport) -> Iterator[Screen]:
    """Yield a screen for each kernel or operation, and its parts."""
    for subject in report.subjects:
        yield _ratios(report, subject)
        profiled = [size for size in subject.sizes if size.parts]
        if profiled:
            yield _parts(max(profiled, key=lambda size: sum(part.time_us for part in size.parts)))


def _ratios(report: BenchReport, subject: BenchSubject) -> Screen:
    sizes = subject.sizes
    emulated = " (emulated here: times say nothing about the recipe in hardware)" if subject.is_emulated else ""
    means = []
    for name, mean in subject.means.items():
        known = sum(cell.speedup is not None for size in sizes for cell in size.contenders if cell.name == name)
        if not name.startswith("fp8tune"):
            means.append(f"{ratio(mean)} over {name}" + (f" on {known} of them" if known < len(sizes) else ""))
    shared, columns = _size_columns(sizes)
    ours = [size.contenders[0] for size in sizes]
    times = ["wrong" if cell.is_wrong else microseconds(cell.time_us) for cell in ours]
    names = [contender.name for contender in sizes[0].contenders]
    shown = [place for place in range(1, len(names)) if any(_cell(size.contenders[place]) != "-" for size in sizes)]
    columns += [
        speedups([_cell(size.contenders[place]) for size in sizes], names[place])
        for place in shown
        if not names[place].startswith("fp8tune")
    ]
    columns.append(number("time us", times))
    rates = {"TFLOP/s": [size.tflops for size in sizes], "GB/s": [size.gb_per_s for size in sizes]}
    if unit := next((unit for unit, values in rates.items() if all(values)), ""):
        columns.append(number(unit, [f"{rate:,.0f}" for rate in rates[unit]], leaves="before cuts"))
    columns += [
        number(names[place].partition(", ")[2], [_cell(size.contenders[place]) for size in sizes], leaves="before cuts")
        for place in shown
        if names[place].startswith("fp8tune")
    ]
    if any(cell.peak_bytes for cell in ours):
        cells = ["-" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**20:,.0f}" for cell in ours]
        columns.append(number("MiB", cells, leaves="before cuts"))
    return Screen(
        [
            f"{subject.name} on {report.gpu}: {subject.title}{emulated}",
            f"{listed(means)} (geometric means of {counted(len(sizes), 'size')})" if means else "",
            f"all with {pairs(shared)}" if shared else "",
        ],
        columns,
        [*_reasons(sizes), "columns of contenders: their time over that of fp8tune"],
        sizes,
    )


def _size_columns(sizes: Sequence[BenchSize]) -> tuple[dict[str, object], list[Column]]:
    """Return what all sizes share, and columns of the rest. A named size needs its first dimension alone."""
    facts = []
    for size in sizes:
        dimensions = [*size.size.items()][: 1 if size.label else None]
        facts.append({**({"layer": size.label} if size.label else {}), **dict(dimensions)})
        facts[-1] |= {"layout": layout(size.layout), "dtype": size.dtype}
        facts[-1] |= {"routing": size.routing} if size.routing != "none" else {}
    shared, names = split_shared(facts)
    plain = {"layout": "contiguous", "dtype": "bfloat16"}
    shared = {name: text for name, text in shared.items() if plain.get(name) != text}
    names = [name for name in names if any(plain.get(name) != fact.get(name) for fact in facts)]
    kinds = {name: Column if name in ("layer", "layout", "dtype", "routing") else number for name in names}
    return shared, [kinds[name](name, [str(fact.get(name, "")) for fact in facts], cut="end") for name in names]


def _cell(contender: BenchContender) -> str:
    return "wrong" if contender.is_wrong else ratio(contender.speedup)


def _reasons(sizes: Sequence[BenchSize]) -> Iterator[str]:
    """Yield why contenders have no time, each reason once with its first size."""
    seen = set()
    for size in sizes:
        for contender in size.contenders:
            if contender.reason and (contender.name, contender.reason) not in seen:
                seen.add((contender.name, contender.reason))
                word = "wrong on" if contender.is_wrong else "not timed on"
                yield f"{contender.name} {word} {pairs(size.size)}: {contender.reason}"


def _parts(size: BenchSize) -> Screen:
    total = sum(part.time_us for part in size.parts)
    lines = [(part.kernel, part.time_us) for part in size.parts if part.time_us >= SMALL_SHARE * total]
    if rest := [part.time_us for part in size.parts if part.time_us < SMALL_SHARE * total]:
        lines.append((counted(len(rest), "shorter launch"), sum(rest)))
    columns = [
        Column("launches of a step, in their order", [name for name, _ in lines], cut="end"),
        number("time us", [microseconds(time_us) for _, time_us in lines]),
        number("%", [f"{100 * time_us / total:.0f}" for _, time_us in lines]),
    ]
    name = " ".join(filter(None, (size.label, pairs(size.size))))
    return Screen([f"parts of fp8tune on {name}: {microseconds(total)} us on the GPU"], columns, [], size.parts)


class BenchProgress(Display):
    """Shows what is compiled, then what is timed."""

    def __init__(self, sizes: int) -> None:
        super().__init__()
        self._done, self._sizes = 0, sizes

    def _event(self, event: Compiled | Row) -> None:
        if isinstance(event, Compiled):
            self.update("compiling", event.done / event.total, count=f"{event.done} of {event.total}")
            return
        self._done += 1
        name = " ".join(filter(None, (event.subject.operation.name, event.size.label, pairs(event.size.shape))))
        ours = event.ours
        note = f"{name}: {ours.check.reason or f'{microseconds(ours.time_us)} us'}"
        self.update("timing", self._done / self._sizes, count=f"{self._done} of {self._sizes}", note=note)
