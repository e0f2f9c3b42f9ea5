"""``fp8tune.lookup``: the config that a kernel would launch, and why that one."""

from __future__ import annotations

from dataclasses import dataclass

from fp8tune.api.results import Shape, sizes_of
from fp8tune.errors import MachineError, UsageError
from fp8tune.measure import device as machine
from fp8tune.plan import problems
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.revisions.loading import load_spec
from fp8tune.store import names
from fp8tune_kernels.runtime import user_tables
from fp8tune_kernels.runtime.chain import Step, taken
from fp8tune_kernels.spec import KernelSpec
from fp8tune_kernels.tables import Table, table


@dataclass(frozen=True)
class Found:
    """What a lookup gives; ``print`` says it in one line."""

    kernel: str
    arch: str
    device: str
    """The GPU's name that rows of one device are looked for by; empty for any of the arch."""
    key: NamedInts
    """What the table is asked for."""
    config: NamedInts
    """What is launched, with every axis."""
    step: Step
    """Where the config comes from: ``key``, ``nearest``, ``fallback`` or ``default``."""
    row_key: NamedInts | None = None
    """The key of the row that was taken; None for the fallback row and the default."""
    row_device: str = ""
    """The device that the row is for; empty for any of the arch."""
    is_own: bool = False
    """Whether the row is of the user's own table, not of the shipped one."""

    def __str__(self) -> str:
        why = {
            Step.KEY: "the row of its key",
            Step.NEAREST: f"the row of the nearest key, {self.row_key}",
            Step.FALLBACK: "the row for any other shape",
            Step.DEFAULT: "the declared default, no row suits",
        }[self.step]
        whose = f" in {'your own' if self.is_own else 'the shipped'} table" if self.step is not Step.DEFAULT else ""
        return f"{self.kernel}, {self.key} on {self.device or self.arch}: {self.config} ({why}{whose})"


def lookup(
    kernel: str,
    shape: Shape,
    *,
    arch: str | None = None,
    device: str | None = None,
    input_layout: str = "contiguous",
    in_dtype: str | None = None,
) -> Found:
    """The config that ``kernel`` would launch on a shape, and by which step of the fallback chain.

    ``kernel`` is a name, ``module:SPEC`` or ``path.py:SPEC``. ``shape`` has the kernel's own sizes, such as
    ``"M=16640 K=5120 G=16"``. ``arch`` and ``device`` are this machine's where ``arch`` is None; otherwise ``device``
    None looks at rows for every device of the arch alone. ``in_dtype`` None is the kernel's first.

    Imports torch and the kernel. Raises UsageError for an unknown name or a shape without a size that the key needs,
    MachineError without ``arch`` where there is no GPU.
    """
    where = _device(arch, device)
    spec = load_spec(kernel)
    problem = _problem(spec, sizes_of(shape), input_layout, in_dtype)
    try:
        own = user_tables.of_kernel(spec, user_tables.user_table(where.arch))
    except ValueError as error:
        raise UsageError(str(error)) from None
    key, exported = spec.lookup_key(problem), user_tables.overlay(own, table(where.arch))
    return _found(spec, where, key, exported, own)


def _device(arch: str | None, device: str | None) -> Device:
    if arch is not None:
        names.check_arch(arch)
        return Device(arch, device or "")
    here = machine.probe()
    if here is None:
        raise MachineError("there is no GPU here to look up a config for: name an arch, such as arch='sm_90'")
    return Device(here.arch, here.name if device is None else device)


def _problem(spec: KernelSpec, shape: NamedInts, input_layout: str, in_dtype: str | None) -> Problem:
    for what, name, known in (
        ("input layout", input_layout, spec.input_layouts),
        ("input dtype", in_dtype or spec.in_dtypes[0], spec.in_dtypes),
    ):
        if name not in known:
            raise UsageError(f"{spec.name} has no {what} {name!r}: it has {', '.join(known)}")
    problem = Problem(spec.name, shape, input_layout=input_layout, in_dtype=in_dtype or spec.in_dtypes[0])
    problems.check_shape(spec, problem)
    return problem


def _found(spec: KernelSpec, where: Device, key: NamedInts, exported: Table, own: Table) -> Found:
    step, row = taken(spec, key, exported, where.name)
    config = NamedInts({**spec.default, **dict(row[3] if row else ())})
    found = Found(spec.name, where.arch, where.name, key, config, step)
    if row is None:
        return found
    measured = None if row[2] is None else dict(row[2])
    row_key = None if measured is None else NamedInts({name: measured[name] for name in key if name in measured})
    return Found(**{**vars(found), "row_key": row_key, "row_device": row[1], "is_own": row in own.rows})
