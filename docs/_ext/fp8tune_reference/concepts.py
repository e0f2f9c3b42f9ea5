"""What the concept pages say of the code: numbers, steps, a formula."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap

from fp8tune import ceiling as ceilings
from fp8tune.measure import checking, edges, guards
from fp8tune.stats.decide import MeasuringPlan
from fp8tune_kernels import groups
from fp8tune_kernels.runtime.chain import Step
from fp8tune_kernels.spec import ROUTINGS
from fp8tune_reference import docstrings
from fp8tune_reference.markdown import code, needed, prose, sentence, table


def protocol() -> str:
    """Return the numbers of the confirmation, where a device was not calibrated."""
    meanings, rows = docstrings.of_attributes(MeasuringPlan), []
    for field in dataclasses.fields(MeasuringPlan):
        value = field.default
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"
        rows.append((code(field.name), shown, prose(needed(meanings.get(field.name, ""), field.name))))
    return table(["number", "value", "meaning"], rows)


def lookup_steps() -> str:
    """The steps of a lookup, in their order."""
    texts = docstrings.of_attributes(Step)
    return "\n".join(
        f"{number}. {code(step)}: {prose(needed(texts.get(step.name, ''), f'Step.{step.name}'))}"
        for number, step in enumerate(Step, 1)
    )


def ceiling() -> str:
    """The formula, as the module has it."""
    paragraphs = inspect.cleandoc(ceilings.__doc__ or "").split("\n\n")
    formula = next(paragraph for paragraph in paragraphs if paragraph.startswith("    "))
    return f"```text\n{textwrap.dedent(formula)}\n```"


def routings() -> str:
    """How rows spread over groups."""
    rows = [(code(name), prose(needed(groups.LAYOUTS[name].__doc__ or "", f"routing {name}"))) for name in ROUTINGS]
    return table(["routing", "group sizes"], rows)


def check_numbers() -> str:
    """How much a check takes."""
    rows = [
        ("launches looked at, on the problem and on each edge", str(checking.LAUNCHES)),
        ("launches in a row, of each config that may be the pick", str(checking.IN_A_ROW)),
        ("guard bytes on each side of a tensor, on a GPU", f"{guards.GPU_GUARD_BYTES >> 20} MiB"),
        ("guard bytes on each side of a tensor, on the interpreter", f"{guards.CPU_GUARD_BYTES >> 10} KiB"),
        ("rows of the small problems that check routings", f"{edges.LAYOUT_CHECK_ROWS:,}"),
    ]
    return table(["number", "value"], [(sentence(text).removesuffix("."), value) for text, value in rows])
