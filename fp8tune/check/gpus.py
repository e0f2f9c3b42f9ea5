"""Check that GPUs of one name are equally fast, by confirmed configs that several of them timed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from fp8tune.check.findings import Finding, Level
from fp8tune.records import Device
from fp8tune.stats.decide import PLAN
from fp8tune.stats.estimate import estimate
from fp8tune.stats.means import group_by
from fp8tune.stats.rank import TIMED_KINDS
from fp8tune.stats.study import Study, process_us
from fp8tune.store.read import Reading
from fp8tune.studies import decided


@dataclass(frozen=True)
class Agreement:
    """Times of the same configs on GPUs that differ only in their UUIDs. Shares are fractions: 0.01 is one percent."""

    device: Device  # without a UUID
    slowdowns: dict[str, float]  # hash of the UUID -> slowdown against the fastest GPU, the fastest first
    is_proven: bool  # True if the slowest GPU is slower than the fastest by more than the tie band, whatever the noise
    spreads: tuple[float, ...]  # of each config: slowest over fastest median, less 1
    losses: tuple[float, ...]  # of each size: slowdown of its slowest GPU's pick on its fastest GPU; 0 for equal picks

    @property
    def agreeing(self) -> int:
        """Number of configs whose medians are all within the tie band."""
        return sum(spread <= PLAN.tie_band for spread in self.spreads)


def agreements(store: Reading) -> list[Agreement]:
    """Return an agreement for each name, driver and software of GPUs of which several confirmed the same size."""

    def question(study: Study) -> tuple[Hashable, ...]:
        return replace(study.device, uuid_hash=""), study.problem, study.source_hash, study.kind

    def shared(pools: Sequence[Study]) -> list[Study]:
        timed = [pool for pool in pools if pool.kind in TIMED_KINDS and pool.has_finals and pool.device.uuid_hash]
        return [pool for group in group_by(timed, question).values() if len(group) > 1 for pool in group]

    sizes = group_by((study for study in store.studies(keep=shared) if study.finals), question).values()
    devices = group_by(sizes, lambda size: replace(size[0].device, uuid_hash=""))
    results = [_agreement(device, of_device) for device, of_device in devices.items()]
    return [result for result in results if result is not None]


def _agreement(device: Device, sizes: Sequence[Sequence[Study]]) -> Agreement | None:
    """Compare GPUs by their studies of each size; None if no config was timed on two."""
    offsets, spreads = dict[str, dict[str, list[float]]](), list[float]()
    for studies in sizes:
        for config in dict.fromkeys(config for study in studies for config in study.finals):
            finals = {study.device.uuid_hash: study.finals[config] for study in studies if config in study.finals}
            if len(finals) < 2:
                continue
            medians_us = [median(map(process_us, processes)) for processes in finals.values()]
            spreads.append(max(medians_us) / min(medians_us) - 1)
            for gpu, processes in finals.items():
                for times in processes:
                    offset = math.log(process_us(times) / median(medians_us))
                    offsets.setdefault(gpu, {}).setdefault(times.process, []).append(offset)
    if not spreads:
        return None
    # Configs of one process share its drift, so that a process is one value.
    values = {gpu: {name: fmean(of_process) for name, of_process in own.items()} for gpu, own in offsets.items()}
    means = dict(sorted(((gpu, fmean(own.values())) for gpu, own in values.items()), key=lambda item: item[1]))
    fastest, *_, slowest = means
    both = values[fastest].keys() & values[slowest].keys()
    differences = [values[slowest][name] - values[fastest][name] for name in both]
    is_proven = len(both) > 1 and estimate(differences).lower(PLAN.alpha) > math.log1p(PLAN.tie_band)
    losses = []
    for studies in sizes:
        best, *_, last = sorted(studies, key=lambda study: [*means].index(study.device.uuid_hash))
        rival = decided([best])[0].rival(decided([last])[0].choice.pick)
        losses += [rival.ratio - 1] if rival else []
    slowdowns = {gpu: math.expm1(mean - means[fastest]) for gpu, mean in means.items()}
    return Agreement(device, slowdowns, is_proven, tuple(spreads), tuple(losses))


def check_gpus(store: Reading) -> Iterator[Finding]:
    """Find GPUs that are slower than others of their name by more than the tie band."""
    for result in agreements(store):
        slowest, slowdown = [*result.slowdowns.items()][-1]
        count, sizes, configs = len(result.slowdowns), len(result.losses), len(result.spreads)
        text = (
            f"{count} GPUs named {result.device.name}: {slowest[:4]} is {slowdown:.1%} slower than the fastest; "
            f"{result.agreeing} of {configs} configs agree within {PLAN.tie_band:.0%}, and "
            f"{result.losses.count(0.0)} of {sizes} picks are the same"
        )
        if result.is_proven:
            fix = "compare their clocks, power limits and temperatures with nvidia-smi -q, or leave the slow one out"
            yield Finding(Level.WARNING, text, fix)
        else:
            yield Finding(Level.OK, text)
