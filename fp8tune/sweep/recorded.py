"""Kernels without a spec, as a sweep takes them: which of a recording, and at which sizes they can be checked."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import cast

from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.measure import checking, kept
from fp8tune.measure.compiling import one_line
from fp8tune.measure.edges import edges_of
from fp8tune.replay import recording
from fp8tune.replay.loading import load_spec, reach_recorded
from fp8tune.replay.spec import RecordedSpec, repeatable
from fp8tune.revisions import source
from fp8tune.revisions.reference import KernelReference
from fp8tune.sweep.options import Options
from fp8tune_kernels.catalog import KERNELS


def composed(options: Options) -> tuple[Options, tuple[str, ...]]:
    """The options with ``--recording``, ``--check`` and ``--reference`` in the text of each kernel; notices.

    A recording alone stands for every kernel in it that can be swept. Raises UsageError where there is none.
    """
    kernels, refused = options.kernels, tuple[str, ...]()
    if options.recording is not None and kernels == tuple(KERNELS):
        kernels = ()
        for kernel in recording.read(Path(options.recording)).kernels:
            try:
                kernels += (repeatable(kernel)[0].name,)
            except UsageError as error:
                refused += (str(error),)
        if not kernels:
            why = refused[0] if refused else "it holds no kernel"
            raise UsageError(f"nothing of {options.recording} can be swept: {why}")
    named = [_completed(KernelReference.parse(kernel), options) for kernel in kernels]
    for each in named:
        reach_recorded(each)
    return replace(options, kernels=tuple(map(str, named))), refused


def _completed(named: KernelReference, options: Options) -> KernelReference:
    """A reference with what it does not say itself."""
    if options.recording is not None and not named.recording and ":" in named.kernel:
        named = replace(named, recording=options.recording)
    if options.check is not None and not named.check:
        check, _, bounds = options.check.partition("=")
        relative, _, absolute = bounds.partition(",")
        text = f"?check={check}" + (f"&relative={relative}" if relative else "")
        asked = KernelReference.parse(f"{named.kernel}{text}" + (f"&absolute={absolute}" if absolute else ""))
        named = replace(named, check=asked.check, relative=asked.relative, absolute=asked.absolute)
    if options.reference is not None and not named.reference:
        named = replace(named, reference=options.reference)
    return named.absolute_paths()


def staleness(reference: str, spec: RecordedSpec) -> str | None:
    """What to tell of a recording that was made with other code."""
    recorded = spec.kernel.source_hash
    if not recorded or recorded == source.source_hash(reference, source.installed(reference)):
        return None
    return f"{spec.name} has changed since it was recorded: its grids and arguments may be others, record it again"


def import_kernel(reference: str) -> None:
    """Import what a kernel needs. Runs in a worker, beside this process, which does so too: it may take ten seconds."""
    with contextlib.suppress(Fp8tuneError):  # said here as well
        load_spec(str(replace(KernelReference.parse(reference), reference="")))


def edge_failure(reference: str, torch_device: str) -> str | None:
    """Why a recorded kernel cannot be checked on its edges: the config declared first must run on each, and agree with
    itself. Runs in a worker: odd sizes may be what the kernel does not expect at all."""
    kept.share_cores()
    named = KernelReference.parse(reference)
    spec = cast(RecordedSpec, load_spec(str(replace(named, reference=""))))
    for edge in {edge: None for problem in spec.recorded for edge in edges_of(spec, problem)}:
        try:
            tensors = checking.build_edge(spec, edge, torch_device)
            if wrong := tensors.check(spec.first(edge.problem)):
                return wrong
        except Exception as error:
            return one_line(error)
    return None
