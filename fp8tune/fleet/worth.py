"""What a problem is worth measuring: under a time budget the worthiest are measured first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from fp8tune.records import Pick, Problem, Subject
from fp8tune.replay.loading import load_spec
from fp8tune.replay.spec import RecordedSpec
from fp8tune.stats.study import OPEN, Verdict
from fp8tune.store.results import Store
from fp8tune.sweep import picks
from fp8tune.sweep.planning import Plan, ProblemPlan

NEW, STALE, UNDECIDED, SETTLED = 4.0, 2.0, 1.0, 0.0
"""Of a problem that nobody measured, that only older code was measured on, whose pick is open, and of the others.

A lookup of a new problem gets another problem's config, which loses more than an old pick of its own does.
"""


def worths(store: Store, plan: Plan) -> Callable[[ProblemPlan], float]:
    """What each problem of an expanded plan is worth on its device name: how much is open, times its uses.

    Uses are launches in the recording, 1 for other problems. In powers of two: workers then stay with a kernel, whose
    configs are compiled, while what it leaves is worth about the same. Zero for a problem that is settled.
    """
    device, kernels = plan.backend.device, sorted({of.version.kernel for of in plan.problems})
    known: dict[Problem, list[Pick]] = {}
    for pick in picks.read(store, kernels, [device.arch]).picks:
        if pick.device.name == device.name and pick.kind is plan.backend.kind:
            known.setdefault(pick.problem, []).append(pick)

    def worth(of: ProblemPlan) -> float:
        is_open = _open(store, plan, of, known.get(of.problem, []))
        return 2.0 ** math.floor(math.log2(is_open * _uses(of))) if is_open else SETTLED

    return worth


def _open(store: Store, plan: Plan, of: ProblemPlan, found: list[Pick]) -> float:
    here = plan.backend.device
    mine = [
        pick
        for pick in found
        if pick.version is not None
        and pick.version.source_hash == of.version.source_hash
        and (pick.device.torch, pick.device.triton, pick.device.runtime) == (here.torch, here.triton, here.runtime)
    ]
    if plan.options.again or not found:
        return NEW
    if not mine:
        return STALE
    is_screened = plan.options.quick or any(pick.verdict != Verdict.QUICK for pick in mine)
    if not is_screened or any(pick.verdict in OPEN or not pick.is_complete for pick in mine):
        return UNDECIDED
    tried = (store.tried(Subject(of.version, pick.device, pick.kind, of.problem)) for pick in mine)
    return SETTLED if any(of.configs.keys() <= configs.keys() for configs in tried) else UNDECIDED


def _uses(of: ProblemPlan) -> int:
    spec = load_spec(of.reference)
    if not isinstance(spec, RecordedSpec) or not (text := spec.document(of.problem)):
        return 1
    return max(1, int(json.loads(text).get("launch", {}).get("count", 1)))
