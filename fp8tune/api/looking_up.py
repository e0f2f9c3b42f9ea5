"""``fp8tune.lookup``: the config that a kernel would launch, and why that one."""

from __future__ import annotations

from fp8tune import names
from fp8tune.api.results import Shape, sizes_of
from fp8tune.errors import MachineError, UsageError
from fp8tune.lookups import Lookup as Lookup
from fp8tune.lookups import look_up
from fp8tune.measure import device as machine
from fp8tune.plan import problems
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels.spec import KernelSpec


def lookup(
    kernel: str,
    shape: Shape,
    *,
    arch: str | None = None,
    device: str | None = None,
    input_layout: str = "contiguous",
    in_dtype: str | None = None,
) -> Lookup:
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
    return look_up(spec, where, spec.lookup_key(problem))


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
