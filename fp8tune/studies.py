"""Studies of a database, decided beside the installed tables, and the records that are made of them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8tune.ceiling import ceiling_of
from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Device, Finalist, Kind, Pick, Problem, Subject
from fp8tune.replay.problems import in_words
from fp8tune.revisions import source
from fp8tune.stats.rank import TIMED_KINDS, answering, competing
from fp8tune.stats.same_code import Programs
from fp8tune.stats.study import Study, Today, Verdict, process_us
from fp8tune.store.layers import Reader
from fp8tune.tables.current import (
    NO_TABLES,
    SHIPPED,
    CurrentTables,
    Recorded,
    completed,
    find_today,
    recorded_configs,
    recorded_launch,
)

if TYPE_CHECKING:
    from fp8tune.stats.same_bits import Bits, SameBits

NOTHING_RECORDED: Mapping[Problem, Recorded] = {}


def read_studies(
    store: Reader,
    kernel: str | None = None,
    arch: str | None = None,
    kinds: Collection[Kind] | None = None,
    *,
    tables: CurrentTables = SHIPPED,
    problems: Collection[Problem] | None = None,
    device: Device | None = None,
) -> list[Study]:
    """Read and decide the study that answers each question; None means any."""
    studies = store.studies(kernel, arch, kinds, keep=competing, problems=problems, device=device)
    documents = store.recorded_launches(kernel)
    studies = decided(studies, tables, recorded_configs(documents))
    return [replace(study, problem=with_words(study.problem, documents.get(study.problem, ""))) for study in studies]


def with_words(problem: Problem, document: str) -> Problem:
    """Return the problem with sizes that print as the recorded arguments do, if there is a recorded launch."""
    with contextlib.suppress(DatabaseError):
        if document:
            return in_words(problem, recorded_launch(document)[1])
    return problem


def decided(
    studies: Iterable[Study],
    tables: CurrentTables = NO_TABLES,
    recorded: Mapping[Problem, Recorded] = NOTHING_RECORDED,
) -> list[Study]:
    """Decide the study that answers each question. The same studies in any order give the same decisions.

    Args:
        studies: Studies as the store reads them. Those without a time count only as failures.
        tables: Tables whose configs stay until beaten.
        recorded: Configs of recorded launches.
    """
    from fp8tune.stats.decide import decide_study  # here: who shows kept picks need not wait for NumPy

    timed = [study for study in studies if study.kind in TIMED_KINDS and study.results]
    return [decide_study(_with_today(study, tables, recorded)) for study in answering(timed)]


def _with_today(study: Study, tables: CurrentTables, recorded: Mapping[Problem, Recorded]) -> Study:
    if study.lookup_key is None:
        return study
    current = tables.config(study.problem.kernel, study.device, study.lookup_key)
    launched, today = recorded.get(study.problem) or Recorded(Today(study.default)), None
    if study.version is not None:
        today = find_today(study.version, study.device, study.lookup_key, launched.today)
    return replace(study, current=completed(current, study.version), today=today, launched=launched.default)


def constrained(store: Reader, studies: Iterable[Study], axis: str) -> tuple[list[SameBits], list[str]]:
    """Choose again, of decided studies, among configs with equal bits at every size; with what has none."""

    def bits_of(study: Study) -> Bits:
        if study.version is None:
            return {}
        return store.output_bits(Subject(study.version, study.device, study.kind, study.problem), axis)

    from fp8tune.stats.same_bits import constrain  # here: who shows kept picks need not wait for NumPy

    return constrain(studies, axis, bits_of)


def pick_of(study: Study) -> Pick:
    """Return a study's decision as the store keeps it."""
    decision, pick, rival, ceiling = study.choice, study.pick, study.next_best, ceiling_of(study)
    today = study.rival(study.today.config) if study.today else None
    default = study.rival(study.default) if study.version else None
    is_bounded = rival is not None and rival.config == decision.runner_up
    result = Pick(
        problem=study.problem,
        config=pick.config,
        device=study.device,
        kind=study.kind,
        version=study.version,
        lookup_key=study.lookup_key,
        bytes_moved=study.bytes_moved,
        source=pick.source,
        note=pick.note,
        runner_up=rival.config if rival else None,
        runner_up_stage=str(rival.stage) if rival else None,
        stage=str(pick.stage),
        verdict=str(decision.verdict),
        time_us=decision.time_us,
        processes=decision.processes,
        ceiling_share=ceiling.share if ceiling else None,
        bound=str(ceiling.bound) if ceiling else None,
        runner_up_us=rival.time_us if rival else None,
        runner_up_ratio=rival.ratio if rival else None,
        slowdown_lower_share=_finite(decision.lower) if is_bounded else None,
        slowdown_upper_share=_finite(decision.upper),
        noise_floor_share=study.noise,
        today=study.today.config if study.today else None,
        today_origin=str(study.today.origin) if study.today else None,
        today_us=today.time_us if today else None,
        speedup_ratio=study.speedup,
        default_ratio=default.ratio if default else None,
        is_default=pick.config is not None and pick.config == study.default,
        is_incumbent=pick.config is not None and pick.config == study.current,
        is_complete=study.complete,
        checked_by=pick.check,
        newest=study.newest,
    )
    return without_rival(result)


def without_rival(pick: Pick) -> Pick:
    """Return a pick without a verdict or speedups if no other config was timed."""
    if pick.runner_up is not None or pick.kind is Kind.PUBLISHED:
        return pick
    verdict = str(Verdict.ALONE) if pick.verdict in (Verdict.PROVEN, Verdict.QUICK) else pick.verdict
    return replace(pick, verdict=verdict, speedup_ratio=None, default_ratio=None)


def finalists_of(study: Study) -> Iterator[Finalist]:
    """Yield the finalists of a study as the store keeps them."""
    for result in study.results:
        if result.finals and result.config is not None:
            times_us = list(map(process_us, result.finals))
            yield Finalist(
                problem=study.problem,
                config=result.config,
                device=study.device,
                time_us=study.times_us[result.config],
                slowdown_ratio=study.slowdowns[result.config],
                processes=len(times_us),
                fastest_process_us=min(times_us),
                slowest_process_us=max(times_us),
                screen_us=result.coarse_us,
                is_pick=result.config == study.choice.pick,
                is_default=result.config == study.default,
            )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def is_stale(pick: Pick | Study, here: Device | None, programs: Callable[[], Programs] = Programs) -> bool:
    """Return True if the GPU that measured a pick is here, and runs other code or another driver now.

    Another Triton runs other code unless it is known to make the same machine code of the pick and its rivals.

    Args:
        pick: Pick or decided study of any device.
        here: GPU of this machine; None if it has none.
        programs: Machine code that is known; called only if it decides.
    """
    if here is None or pick.kind is not Kind.MEASURED or pick.device.name != here.name or pick.version is None:
        return False
    if pick.device.driver != here.driver:
        return True
    if pick.device.triton != here.triton and not programs().is_unchanged(pick, here):
        return True
    return installed_hash(pick.version.kernel) not in ("", pick.version.source_hash)


def known_programs(store: Reader, arch: str | None = None) -> Callable[[], Programs]:
    """Return a function that reads the machine code of results once, at its first call."""
    installed_hash.cache_clear()  # files may have changed since another command of this process
    return functools.cache(lambda: Programs(store.programs(arch=arch)))


@functools.cache
def installed_hash(kernel: str) -> str:
    """Return the hash of a kernel's code on this machine, without importing it; empty if it is not here."""
    try:
        return source.source_hash(kernel)
    except UsageError:
        return ""
