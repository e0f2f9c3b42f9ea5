"""How a comparison is shown: a table, markdown for a pull request, a page of HTML, JSON; and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fp8tune.comparing.comparison import ComparedRow, Comparison
from fp8tune.comparing.live import Event
from fp8tune.comparing.rows import Step
from fp8tune.comparing.verdicts import ChangeVerdict
from fp8tune.records import Device, Problem
from fp8tune.render import contracts
from fp8tune.render.progress import Display
from fp8tune.render.report import Column, Report, html_text, left, markdown_text, print_parts, right
from fp8tune.render.terminal import kernel_name, print_json, slower, times
from fp8tune.stats.estimate import Estimate

LEGEND = (
    "Change: after/before - 1, above 0 is slower. Detectable: the least slowdown found in 95 % of such runs. "
    "Control: the same of the first side's code against itself."
)


def print_comparison(comparison: Comparison, output_format: str) -> None:
    """Two revisions side by side: ``table``, ``markdown``, ``json`` or ``html``."""
    match output_format:
        case "json":
            print_json(contracts.comparison(comparison))
        case "markdown":
            print(markdown(comparison))
        case "html":
            print(page(comparison))
        case _:
            print_parts([*_reports(comparison, str.lower), summary(comparison), _about(comparison)], output_format)


def _reports(comparison: Comparison, header: Callable[[str], str] = str) -> Iterator[Report[ComparedRow]]:
    """A table a device."""
    columns: list[Column[ComparedRow]] = [
        left("Kernel", lambda row: kernel_name(row.kernel)),
        left("Shape", lambda row: _problem(row.problem)),
        right("Before (us)", lambda row: _microseconds(row.before_us)),
        right("After (us)", lambda row: _microseconds(row.after_us)),
        right("Speedup", lambda row: times(1 / row.ratio if row.ratio else None)),
        right("Change", lambda row: slower(row.ratio, 2)),
        right("95 % interval", lambda row: _interval(row.effect)),
        right("Detectable", lambda row: slower(row.smallest_detectable, 2)),
        right("Control", _control),
        left("Verdict", lambda row: str(row.verdict)),
    ]
    columns = [Column(header(column.header), column.side, column.cell) for column in columns]
    found = dict.fromkeys(row.device for row in comparison.rows)
    # rows of a kernel that is new as a whole have no device
    for device in sorted(found, key=lambda device: device is None) or [None]:
        yield Report(_described(device), columns, [row for row in comparison.rows if row.device == device], names=2)


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.{1 if value >= 100 else 2}f}"


def _interval(effect: Estimate | None) -> str:
    return " to ".join(slower(bound, 2) for bound in effect.interval) if effect else ""


def _control(row: ComparedRow) -> str:
    return "" if row.control is None else slower(row.control.ratio, 2) + ("" if row.is_stable else " (drifted)")


def summary(comparison: Comparison) -> str:
    """The verdicts counted, the geometric means, and how many blocks the machine disturbed."""
    counts = {verdict: sum(row.verdict is verdict for row in comparison.rows) for verdict in ChangeVerdict}
    said = [", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no rows"]
    if comparison.geomean is not None:
        said.append(f"geometric mean of the change {_mean(comparison.geomean, comparison.overall)}")
    if comparison.control is not None:
        state = "stable" if comparison.is_stable else "drifted"
        said.append(f"of the control arm {_mean(comparison.control.ratio, comparison.control)}, {state}")
    blocks = sum(row.blocks for row in comparison.rows)
    if throttled := sum(row.throttled for row in comparison.rows):
        said.append(f"{throttled} of {blocks} blocks were timed while the GPU was slowed down")
    if ungated := sum(row.ungated for row in comparison.rows):
        said.append(f"{ungated} of {blocks} blocks include the host's time: their launches wait for the GPU")
    return "; ".join(said) + "."


def _mean(ratio: float, effect: Estimate | None) -> str:
    return slower(ratio, 2) + (f" ({_interval(effect)})" if effect else "")


def _about(comparison: Comparison) -> str:
    return f"Before: {comparison.before}, after: {comparison.after}. {comparison.origin}."


def _provenance(comparison: Comparison, title: str) -> str:
    return f"{title}. {_about(comparison)} {summary(comparison)}"


def _described(device: Device | None) -> str:
    if device is None:
        return "No rows on any device"
    versions = {"driver": device.driver, "": device.runtime, "torch": device.torch, "triton": device.triton}
    said = [f"{name} {version}".strip() for name, version in versions.items() if version]
    return ", ".join([f"{device.name or 'unnamed device'} ({device.arch})", *said])


def _problem(problem: Problem | None) -> str:
    """The shape, and of the rest what is not as usual."""
    if problem is None:
        return ""
    usual = Problem(problem.kernel, problem.shape)
    named = ("routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode")
    unusual = [value for name in named if (value := getattr(problem, name)) not in ("", getattr(usual, name))]
    return ", ".join([str(problem.shape), *unusual])


def markdown(comparison: Comparison) -> str:
    """A table a device, each with the line that says where it comes from."""
    return "\n\n".join(
        f"{report.markdown()}\n\n{markdown_text(_provenance(comparison, report.title))}"
        for report in _reports(comparison)
    )


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; color-scheme: light dark }}
table {{ border-collapse: collapse }}
th, td {{ padding: .2em .7em; border-bottom: 1px solid #8884; text-align: left; white-space: nowrap }}
.right {{ text-align: right; font-variant-numeric: tabular-nums }}
.REGRESSION, .NEWLY-WRONG {{ color: #c22 }}
.IMPROVEMENT {{ color: #292 }}
.INCONCLUSIVE {{ color: #b70 }}
</style>
<h1>{title}</h1>
{tables}
<p>{legend}</p>
</html>"""


def page(comparison: Comparison) -> str:
    """The same as one self-contained page."""
    tables = [
        f"{report.html(lambda row: str(row.verdict))}\n<p>{html_text(_provenance(comparison, report.title))}</p>"
        for report in _reports(comparison)
    ]
    title = html_text(f"{comparison.before} .. {comparison.after}")
    return PAGE.format(title=title, tables="\n".join(tables), legend=html_text(LEGEND))


class CompareProgress(Display):
    """What a live comparison is doing and when it ends."""

    def show(self, event: Event) -> None:
        """Take one event of :func:`fp8tune.comparing.live.compare`."""
        if isinstance(event, Step):
            self.update(event.text, event.done, event.total)
