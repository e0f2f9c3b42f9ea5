"""``fp8tune explain``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fp8tune.commands.filters import Filters
from fp8tune.commands.options import opened_to_read
from fp8tune.commands.sizes import sizes
from fp8tune.errors import UsageError, unknown
from fp8tune.options import (
    Arch,
    Argument,
    Group,
    InDtype,
    JsonOrTable,
    Names,
    Option,
    ReadDatabase,
    TableFormat,
    examples,
)
from fp8tune.records import NamedInts, Problem, Subject
from fp8tune.render.terminal import notice

if TYPE_CHECKING:
    from fp8tune.lookups import Lookup
    from fp8tune.stats.study import Study

LISTED = 20
"""Configs that are printed; JSON has all."""

MATCHES = 20
"""Problems that are listed where a shape fits several."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """The options of ``explain``."""

    arch: Arch = None
    device: Annotated[
        str, Option("--device", "A GPU whose name has this text.", "all", group=Group.WHERE, placeholder="TEXT")
    ] = ""
    routing: Annotated[
        str | None, Option("--routing", "How rows spread over groups, such as jagged.", placeholder="NAME")
    ] = None
    layout: Annotated[
        str | None, Option("--layout", "How the input lies in memory, such as transposed.", placeholder="NAME")
    ] = None
    in_dtype: InDtype = None
    db: ReadDatabase = None
    top: Annotated[
        int | None,
        Option(
            "--top", "So many configs, the pick and the fastest first.", f"{LISTED}; JSON has all", group=Group.OUTPUT
        ),
    ] = None
    explain: Annotated[
        bool, Option("--explain", "Say below the tables what their columns and words mean.", group=Group.OUTPUT)
    ] = False
    format: JsonOrTable = TableFormat.TABLE


@examples(
    ("How the pick for one shape came about", "fp8tune explain colwise M=16640,K=1408,G=64"),
    ("The same, its sizes in the kernel's order", "fp8tune explain rowwise-2d 16640x1408 --device H100"),
)
def explain(
    kernel: Annotated[str, Argument("A kernel, as show --kernel names it.", "KERNEL", completes=Names.KERNEL)],
    shape: Annotated[str, Argument("Sizes such as M=16640,K=1408, or 16640x1408 in the kernel's order.", "SHAPE")],
    options: ExplainOptions,
) -> None:
    """All that was tried for one row of show, and why that was picked.

    Every config with its time, the finals, how the verdict follows, and what a lookup launches.

    A shape that fits several problems is an error that lists them. Needs no GPU.
    """
    from fp8tune import names
    from fp8tune.render.explanation import print_explanation
    from fp8tune.stats.explanation import Explanation
    from fp8tune.stats.rank import TIMED_KINDS
    from fp8tune.studies import read_studies

    if options.top is not None and options.top < 1:
        raise UsageError(f"--top {options.top} leaves nothing to show: give 1 or more")
    with opened_to_read(options.db) as (store, db):
        (name,) = names.stored_kernels([kernel], store)
        if options.arch is not None:
            names.check_arch(options.arch, store)
        studies = read_studies(store, name, options.arch, TIMED_KINDS)
        if not studies:
            raise UsageError(f"no timed rows of {name} in {db}: run fp8tune sweep --kernel {name}")
        study = _only(_matching(studies, shape, options), name, shape)
        outcomes = {}
        if study.version is not None:
            subject = Subject(study.version, study.device, study.kind, study.problem)
            outcomes = store.tried(subject, stage=None)
    explanation = Explanation(study, outcomes)
    print_explanation(
        explanation, _looked_up(study), options.format, top=options.top or LISTED, explain=options.explain
    )


def _looked_up(chosen: Study) -> Lookup | None:
    """What a lookup gives for the problem. The declaration is that of the rows, so that no kernel is imported."""
    from fp8tune.lookups import Declared, look_up

    if chosen.version is None or chosen.lookup_key is None:
        return None
    return look_up(Declared.of(chosen.version), chosen.device, chosen.lookup_key)


def _matching(known: Sequence[Study], shape: str, options: ExplainOptions) -> list[Study]:
    """Those that the shape and options fit. Raises UsageError for a size or name that none has."""
    positional = re.fullmatch(r"\d+(x\d+)*", shape)
    values = tuple(map(int, shape.split("x"))) if positional else ()
    wanted = Filters(() if positional else (sizes(shape),), options.device)
    wanted.check([one.problem for one in known], [one.device for one in known])
    for flag, attribute, value in (
        ("routing", "routing", options.routing),
        ("layout", "input_layout", options.layout),
        ("in-dtype", "in_dtype", options.in_dtype),
    ):
        names = {getattr(one.problem, attribute) for one in known}
        if value is not None and value not in names:
            raise unknown(flag, value, names)

    def fits(problem: Problem) -> bool:
        asked = (options.routing, options.layout, options.in_dtype)
        has = (problem.routing, problem.input_layout, problem.in_dtype)
        begins = tuple(problem.shape.values())[: len(values)] == values
        return begins and all(one in (None, other) for one, other in zip(asked, has, strict=True))

    return [
        one for one in known if fits(one.problem) and wanted.has_problem(one.problem) and wanted.has_device(one.device)
    ]


def _only(found: Sequence[Study], kernel: str, shape: str) -> Study:
    """The one that was found. Raises UsageError for none or several, which are listed."""
    if not found:
        raise UsageError(f"no timed problem of {kernel} fits {shape} and the options: fp8tune show --kernel {kernel}")
    if len(found) == 1:
        return found[0]
    notice(*(f"  {line}" for line in map(_described, found[:MATCHES])))
    more = f", {MATCHES} of them above" if len(found) > MATCHES else ""
    raise UsageError(
        f"{len(found)} problems fit {shape}{more}: name one by its sizes, --device, --routing, --layout or --in-dtype"
    )


def _described(one: Study) -> str:
    problem = one.problem
    text = f"{_text(problem.shape)} {problem.routing} {problem.input_layout} {problem.in_dtype}"
    return f"{text} on {one.device.name or one.device.arch}"


def _text(shape: NamedInts) -> str:
    return ",".join(f"{name}={value}" for name, value in shape.items())
