"""``fp8tune bench``."""

from __future__ import annotations

from fp8tune.bench import run
from fp8tune.measure.backends import backend_for
from fp8tune.options import BenchOptions
from fp8tune.output import bench as screens
from fp8tune.output.progress import Display
from fp8tune.output.tables import notice, print_document
from fp8tune.output.text import pairs


def bench(options: BenchOptions) -> int:
    """Time all contenders. Exit code 1: an output of fp8tune-kernels is wrong."""
    backend, notices = backend_for(None, None)
    subjects = run.planned(options, backend)
    notice(*notices)
    rows: list[run.Row] = []
    try:
        with Display() as progress:
            for event in run.run(backend, subjects):
                if isinstance(event, run.Compiled):
                    phase, done, total, note = "compiling", event.done, event.total, ""
                else:
                    rows.append(event)
                    phase, done, total = "timing", len(rows), sum(len(subject.sizes) for subject in subjects)
                    note = f"{event.subject.operation.name} {event.size.label} {pairs(event.size.shape)}"
                progress.update(phase, done / total, count=f"{done} of {total}", note=note)
    finally:  # after Ctrl-C what is there is printed
        if rows:
            report = screens.make_report(rows)
            print_document(report, screens.screens(report), options.format)
    if is_wrong := any(row.is_wrong for row in rows):
        notice("fp8tune: an output of fp8tune-kernels is wrong: see above")
    return int(is_wrong)
