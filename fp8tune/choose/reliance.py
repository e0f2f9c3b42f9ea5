"""Why a GPU is not relied on, from what was read and measured of it. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from fp8tune.choose.levels import COPY, Question
from fp8tune.records import Device, Evidence, NamedInts, Status
from fp8tune.stats.means import median

LEAST_COPY = 0.9
"""Share of the copy ceiling that is far below it. Of 8 H100s and 8 H200s none was 0.7 % below the median of its
mates, and no copy of one of them 0.4 % below another."""

FEWEST_WRONG = 3
"""Configs that are wrong here and right on a mate before the GPU is at fault. One may be the config's doing, where
threads race."""


def copy_fault(device: Device, copy_gb_per_s: float | None, measured: Mapping[Device, Mapping[str, float]]) -> str:
    """Whether a copy is far below what it was on this very GPU, or what it is on its mates; empty if not.

    ``measured``: the newest values of calibrations and sweeps of devices of its name.
    """
    if copy_gb_per_s is None:
        return ""
    own = measured.get(device, {}).get(COPY)
    mates = [
        values[COPY]
        for of, values in measured.items()
        if COPY in values and of != device and replace(of, uuid_hash="") == replace(device, uuid_hash="")
    ]
    for expected, whose in ((own, "it had before"), (median(mates) if mates else None, "GPUs of its name have")):
        if expected and copy_gb_per_s < LEAST_COPY * expected:
            share = f"{copy_gb_per_s / expected:.0%} of the {expected:,.0f} that {whose}"
            return f"a copy reaches {copy_gb_per_s:,.0f} GB/s, {share}"
    return ""


def check_fault(device: Device, evidence: Iterable[Evidence]) -> str:
    """Whether configs are wrong on this GPU that are right on its mates, on the same problems; empty if not."""
    statuses: dict[Question, dict[Device, Collection[Status]]] = {}
    for entry in evidence:
        version = entry.version.source_hash if entry.version else ""
        question = Question(entry.problem, entry.config or NamedInts(), version, "")
        if replace(entry.device, uuid_hash="") == replace(device, uuid_hash=""):
            of = statuses.setdefault(question, {})
            of[entry.device] = {*of.get(entry.device, ()), entry.status}
    contradicted = [
        question
        for question, of in statuses.items()
        if Status.WRONG in of.get(device, ())
        and any(Status.OK in found and Status.WRONG not in found for mate, found in of.items() if mate != device)
    ]
    if len(contradicted) < FEWEST_WRONG:
        return ""
    return f"{len(contradicted)} configs are wrong here that are right on GPUs of its name"
