"""Kernels without a spec: which of a recording are swept, and at which sizes they can be checked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

from fp8tune import registry
from fp8tune.errors import UsageError, one_line
from fp8tune.measure import checking, tensor_cache
from fp8tune.measure.edges import edges_of
from fp8tune.measure.engine import Worker
from fp8tune.measure.worker import RemoteError, WorkerDied
from fp8tune.options import SweepOptions
from fp8tune.records import Kind
from fp8tune.replay import recording
from fp8tune.replay.loading import load_spec, reach_recorded
from fp8tune.replay.spec import RecordedSpec, repeatable
from fp8tune.revisions import source
from fp8tune.revisions.reference import KernelReference


def composed(options: SweepOptions) -> tuple[SweepOptions, tuple[str, ...]]:
    """Put ``--recording``, ``--tolerance`` and ``--reference`` into the text of each kernel. Returns notices too.

    A recording alone stands for every kernel in it that can be swept. Raises UsageError if there is none.
    """
    refused, kernels = list[str](), options.kernel
    if options.recording is not None and not kernels:
        for kernel in recording.read(Path(options.recording)).kernels:
            try:
                kernels += (repeatable(kernel)[0].name,)
            except UsageError as error:
                refused.append(str(error))
        if not kernels:
            reason = refused[0] if refused else "it holds no kernel"
            raise UsageError(f"nothing of {options.recording} can be swept: {reason}")
    check = _check_of(options.tolerance)
    complete = [_completed(KernelReference.parse(kernel), options, check) for kernel in kernels or registry.kernels()]
    for reference in complete:
        reach_recorded(reference)
    return replace(options, kernel=tuple(map(str, complete))), tuple(refused)


def _check_of(tolerance: str) -> str:
    """Return the check of a ``--tolerance`` as kernels' texts have it; empty for the kernel's own."""
    if match := re.fullmatch(r"([0-9.eE+-]{1,30}),([0-9.eE+-]{1,30})", tolerance):
        return f"?check=tolerance&relative={match[1]}&absolute={match[2]}"
    if tolerance not in (rules := {"auto": "", "exact": "?check=exact", "exact-sums": "?check=exact-inputs"}):
        raise UsageError(f"--tolerance {tolerance!r:.80} is unknown: use exact, exact-sums, auto or RTOL,ATOL")
    return rules[tolerance]


def _completed(kernel: KernelReference, options: SweepOptions, check: str) -> KernelReference:
    """Add what the options say and the kernel's text does not."""
    if options.recording is not None and not kernel.recording and ":" in kernel.kernel:
        kernel = replace(kernel, recording=options.recording)
    if check and not kernel.check:
        rule = KernelReference.parse(f"{kernel.kernel}{check}")
        kernel = replace(kernel, check=rule.check, relative=rule.relative, absolute=rule.absolute)
    if options.reference is not None and not kernel.reference:
        kernel = replace(kernel, reference=options.reference)
    return kernel.absolute_paths()


def checkable(reference: str, kind: Kind, worker: Worker) -> tuple[str, list[str]]:
    """Return a kernel's text as workers get it, and notices about its recording and its check."""
    spec, kernel = load_spec(reference), KernelReference.parse(reference)
    if not isinstance(spec, RecordedSpec):
        if not kernel.overrides:
            return reference, []
        rule = f"{spec.check_text}{f' with {kernel.reference}' if kernel.reference else ''}"
        return reference, [f"{spec.name} is checked by {rule}, not by its own {load_spec(kernel.kernel).check_text}"]
    notices, untried = [f"{spec.name}: {notice}" for notice in spec.notices], spec.untried_sizes
    recorded_hash = spec.kernel.source_hash
    if recorded_hash and recorded_hash != source.source_hash(reference, source.installed(reference)):
        changed = "has changed since it was recorded: its grids and arguments may be others, record it again"
        notices.insert(0, f"{spec.name} {changed}")
    torch_device = {Kind.MEASURED: "cuda", Kind.INTERPRETER: "cpu"}.get(kind)
    if torch_device and spec.has_odd_sizes:
        try:
            failure = worker.run(edge_failure, reference, torch_device)
        except (WorkerDied, RemoteError) as error:
            failure = str(error).strip().splitlines()[-1][:300]
        if failure:
            reference, untried = str(replace(kernel, sizes="recorded")), failure
    if untried:
        notices.append(f"{spec.name} is not checked on odd sizes: {untried}")
    return reference, notices


def edge_failure(reference: str, torch_device: str) -> str | None:
    """Explain why a recorded kernel cannot be checked on its edge cases; None if it can. Runs in a worker.

    The config declared first must run on each and agree with itself: the kernel may not expect odd sizes at all.
    """
    tensor_cache.use_one_thread()
    spec = cast(RecordedSpec, load_spec(str(replace(KernelReference.parse(reference), reference=""))))
    for edge in {edge: None for problem in spec.recorded for edge in edges_of(spec, problem)}:
        try:
            tensors = checking.build(spec, edge, torch_device)
            if wrong := tensors.check(spec.first(edge.problem)):
                return wrong
        except Exception as error:
            return one_line(error)
    return None
