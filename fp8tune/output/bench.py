"""Document and screens of ``bench``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8tune.bench.run import Row
from fp8tune.output.documents import Document, Gpu, Size, value
from fp8tune.output.show import USUAL, size_columns
from fp8tune.output.tables import Column, Screen, number
from fp8tune.output.text import counted, listed, mean, microseconds, pairs, ratio, split_shared
from fp8tune.stats.means import group_by

SMALL_SHARE = 0.01  # parts of a step that take less are shown as one


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

    label: str = value("Name of the size in its shape set; empty if it has none.", source="size.label")
    size: Size = value("Problem size by dimension.", source="size.shape")
    routing: str = value("How rows spread over groups; none for a kernel without groups.", source="size.routing")
    layout: str = value("Layout of the input.", source="size.input_layout")
    dtype: str = value("Dtype of the input.", source="size.in_dtype")
    config: dict[str, int] | None = value("Launch config of fp8tune's kernel; null for operations.")
    tflops: float | None = value("Speed of fp8tune in TFLOP/s; null if the kernel declares no operations.")
    gb_per_s: float | None = value("Rate of fp8tune, counting the least bytes.", "GB/s")
    contenders: list[BenchContender] = value("Contenders, fp8tune first.")
    parts: list[BenchPart] = value("Launches of a step of fp8tune; empty without a profile.", source="ours.parts")


class BenchSubject(Document):
    """One kernel or operation."""

    name: str = value("Name of the kernel or operation.")
    title: str = value("What is timed.")
    is_emulated: bool = value("True if this GPU has no hardware for it, so that times say nothing about the recipe.")
    means: dict[str, float] = value("Geometric mean of the speedups over each contender.", "x")
    sizes: list[BenchSize] = value("Sizes, in the order of the shape set.")


class BenchReport(Document, printed_by="bench"):
    """Everything that one run of bench timed."""

    gpu: Gpu = value("Name of the GPU.")
    arch: str = value("Architecture of the GPU.")
    torch: str = value("Version of torch.")
    triton: str = value("Version of Triton.")
    subjects: list[BenchSubject] = value("Kernels or operations.")


def make_report(rows: Sequence[Row]) -> BenchReport:
    """Return the rows of a run, at least one, as a document."""
    device, subjects = rows[0].device, []
    for group in group_by(rows, lambda row: row.subject.reference).values():
        operation, names, sizes = group[0].subject.operation, group[0].subject.names, []
        for row in group:
            contenders = [
                BenchContender.from_records(cell, name=name, speedup=row.speedup(name))
                for name, cell in row.cells.items()
            ]
            sizes.append(BenchSize.from_records(row, contenders=contenders))
        means = {name: mean(row.speedup(name) for row in group) for name in names[1:]}
        means = {name: speedup for name, speedup in means.items() if speedup}
        is_emulated = operation.is_emulated(device.arch)
        subjects.append(BenchSubject.from_records(operation, is_emulated=is_emulated, means=means, sizes=sizes))
    return BenchReport.from_records(device, gpu=device, subjects=subjects)


def screens(report: BenchReport) -> Iterator[Screen]:
    """Yield a screen for each kernel or operation, and its parts."""
    for subject in report.subjects:
        yield _ratios(report, subject)
        size = max(subject.sizes, key=lambda size: sum(part.time_us for part in size.parts))
        if size.parts:
            yield _parts(size)


def _ratios(report: BenchReport, subject: BenchSubject) -> Screen:
    sizes = subject.sizes
    # A size with a name needs its first dimension alone.
    dims = [dict([*size.size.items()][: 1 if size.label else None]) for size in sizes]
    attributes = [{"layout": size.layout, "dtype": size.dtype, "routing": size.routing} for size in sizes]
    shared, columns = size_columns(dims, attributes)
    shared |= {name: text for name, text in split_shared(attributes)[0].items() if text not in USUAL}
    columns = [Column("layer", [size.label for size in sizes], loses="end"), *columns]
    names = {place: cell.name for place, cell in enumerate(sizes[0].contenders) if not cell.name.startswith("fp8tune")}
    means = []
    for place, name in names.items():
        cells = [size.contenders[place] for size in sizes]
        texts = ["wrong" if cell.is_wrong else ratio(cell.speedup) for cell in cells]
        if {*texts} != {"-"}:
            columns.append(number(name, texts))
        if known := sum(cell.speedup is not None for cell in cells):
            part = f" on {known} of them" if known < len(sizes) else ""
            means.append(f"{ratio(subject.means[name])} over {name}{part}")
    ours = [size.contenders[0] for size in sizes]
    columns.append(number("time us", ["wrong" if cell.is_wrong else microseconds(cell.time_us) for cell in ours]))
    unit = "TFLOP/s" if all(size.tflops for size in sizes) else "GB/s"
    rates = [size.tflops if unit == "TFLOP/s" else size.gb_per_s for size in sizes]
    columns.append(number(unit, [f"{rate:,.0f}" if rate else "" for rate in rates], loses="all"))
    peaks = [f"{cell.peak_bytes / 2**20:,.0f}" if cell.peak_bytes else "" for cell in ours]
    columns.append(number("MiB", peaks, loses="all"))
    emulated = " (emulated here: times say nothing about the recipe in hardware)" if subject.is_emulated else ""
    above = [
        f"{subject.name} on {report.gpu}: {subject.title}{emulated}",
        f"{listed(means)} (geometric means of {counted(len(sizes), 'size')})" if means else "",
        f"all with {pairs(shared)}" if shared else "",
    ]
    # Each reason once, with its first size.
    reasons: dict[tuple[str, str], str] = {}
    for size in sizes:
        for cell in size.contenders:
            if cell.reason:
                problem = f"{'wrong' if cell.is_wrong else 'not timed'} on {pairs(size.size)}"
                reasons.setdefault((cell.name, cell.reason), f"{cell.name} {problem}: {cell.reason}")
    return Screen(above, columns, [*reasons.values(), "columns of contenders: their time over that of fp8tune"], sizes)


def _parts(size: BenchSize) -> Screen:
    total = sum(part.time_us for part in size.parts)
    parts = [part for part in size.parts if part.time_us >= SMALL_SHARE * total]
    if rest := [part.time_us for part in size.parts if part.time_us < SMALL_SHARE * total]:
        parts.append(BenchPart(kernel=counted(len(rest), "shorter launch"), time_us=sum(rest)))
    columns = [
        Column("launches of a step, in their order", lambda part: part.kernel, loses="end"),
        number("time us", lambda part: microseconds(part.time_us)),
        number("%", lambda part: f"{100 * part.time_us / total:.0f}"),
    ]
    name = " ".join(filter(None, (size.label, pairs(size.size))))
    return Screen([f"parts of fp8tune on {name}: {microseconds(total)} us on the GPU"], columns, [], parts)
