"""What a format is written from: the picks of one kernel on one device, with their evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from fp8tune.choose.candidates import Candidates
from fp8tune.choose.incumbents import COMMITTED
from fp8tune.choose.ranking import all_candidates, competing, grouped, usable
from fp8tune.errors import DatabaseError, UsageError
from fp8tune.records import Device, Kind, NamedInts, Problem, Status, Subject
from fp8tune.replay import configs, recording
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch
from fp8tune.store.layers import Reader
from fp8tune.text import visible


@dataclass(frozen=True)
class Tuned:
    """One problem, decided."""

    problem: Problem
    lookup_key: NamedInts
    config: NamedInts
    """The pick, as rows hold it."""
    launch_config: Config
    """The pick as Triton takes it."""
    time_us: float | None
    times_us: Mapping[NamedInts, float]
    """Every right config that was timed (finals where there are any, else the screen) -> microseconds."""
    evidence: str
    """One line: verdict, microseconds, device, driver, triton, commit."""
    verdict: str = ""
    launch: Launch | None = None
    """As recorded; None for a kernel with a spec of its own."""
    failures: Mapping[NamedInts, tuple[str, str]] = field(default_factory=dict)
    """Config -> (status, reason)."""
    is_published: bool = False
    check: str = "exact"
    slowdowns: Mapping[NamedInts, float] = field(default_factory=dict)
    """Every config of ``times_us`` -> its time over the best one's, at least 1. Finals are compared with finals alone
    and screening times with those, so these are no ratios of ``times_us``."""


@dataclass(frozen=True)
class Given:
    """One kernel on one device."""

    kernel: str
    device: Device
    tuned: tuple[Tuned, ...]
    """In the order of the recording, or of the shape sets."""
    configs: Mapping[NamedInts, Config]
    """Each config that any row holds, as Triton takes it."""
    recorded: Kernel | None = None
    """The kernel without launches, where it was recorded."""
    axes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The grid that was swept: breaks ties canonically."""
    notices: tuple[str, ...] = ()
    """One line each: what was left out and why."""


@dataclass(frozen=True)
class File:
    """One file that a format consists of."""

    path: PurePosixPath
    """Below the folder that the user names."""
    text: str


def given_for(store: Reader, arch: str, kernel: str, device: str | None = None) -> Given:
    """What the database has of a kernel on one device of an arch: the one named, else the one with the most problems.

    Raises UsageError where nothing was swept to its end, for a device without rows, and where as many problems were
    swept on several devices.
    """
    timed = _timed(store, arch, kernel)
    name, notices = _device(grouped(timed, lambda one: one.device.name), device)
    on_device = [one for one in timed if one.device.name == name]
    complete = usable(on_device)
    notices += [
        f"{one.problem.shape} left out, not swept to the end: run fp8tune sweep again"
        for one in on_device
        if one not in complete
    ]
    if not complete:
        raise UsageError(f"no problem of {kernel} was swept to the end on {name or arch}: run fp8tune sweep again")
    documents = {problem: _document(text) for problem, text in store.recorded_launches(kernel).items()}
    recorded, complete, older = _of_one_kernel(complete, documents)
    notices += older
    tuned = []
    for one in _in_order(complete, list(documents)):
        launch = documents[one.problem][1] if one.problem in documents else None
        tuned.append(_tuned(store, one, launch, recorded))
    notices += filter(None, map(_doubt, tuned))
    held = {config for one in tuned for config in (one.config, *one.times_us, *one.failures)}
    newest = max(complete, key=lambda one: max(entry.newest for entry in one.entries))
    version = newest.entries[0].version
    return Given(
        kernel,
        newest.device,
        tuple(tuned),
        {config: launched(recorded, config) for config in sorted(held, key=lambda config: config.canonical)},
        recorded,
        version.axes if version else (),
        tuple(dict.fromkeys(notices)),
    )


def given_for_each_device(store: Reader, arch: str, kernel: str) -> list[Given]:
    """:func:`given_for` for each device of an arch, by name; one where nothing was swept to its end is a notice.

    Raises UsageError where that is so for all.
    """
    found, refused = [], []
    for name in sorted({one.device.name for one in _timed(store, arch, kernel)}):
        try:
            found.append(given_for(store, arch, kernel, name))
        except UsageError as error:
            refused.append(str(error))
    if not found:
        raise UsageError(refused[0])
    return [replace(found[0], notices=(*found[0].notices, *refused)), *found[1:]]


def _timed(store: Reader, arch: str, kernel: str) -> list[Candidates]:
    found = all_candidates(store.evidence(kernel, arch, keep=competing), COMMITTED)
    timed = [one for one in found if one.kind is not Kind.STATIC and one.named]
    if not timed:
        raise UsageError(
            f"{kernel} has no timed rows for {arch}: run fp8tune sweep, or name another database with --db"
        )
    return timed


def launched(recorded: Kernel | None, config: NamedInts) -> Config:
    """A config of a row as Triton takes it, its names in the order that the kernel declares them in.

    Raises DatabaseError for a number that stands for no value of the recorded kernel.
    """
    if recorded is None:
        options: dict[str, Any] = {name: config[name] for name in CONFIG_OPTIONS if name in config}
        if "maxnreg" in options:
            options["maxnreg"] = options["maxnreg"] or None
        return Config({name: value for name, value in config.items() if name not in CONFIG_OPTIONS}, **options)
    try:
        found = configs.decoded(recorded, config)
    except (ValueError, TypeError) as error:
        raise DatabaseError(f"{error}: forget that row, or sweep the kernel again") from None
    names = dict.fromkeys(name for declared in recorded.configs for name in declared.kwargs)
    return replace(
        found, kwargs={name: found.kwargs[name] for name in {**names, **found.kwargs} if name in found.kwargs}
    )


def _device(by_name: Mapping[str, Sequence[Candidates]], wanted: str | None) -> tuple[str, list[str]]:
    """The name of the device, and what to say where there are others."""
    known = ", ".join(f"{name or 'not named'} ({len(found)})" for name, found in sorted(by_name.items()))
    if wanted is not None:
        if wanted not in by_name:
            raise UsageError(f"no rows of a device {wanted!r}: name one of these, with their problems: {known}")
        return wanted, []
    most = max(map(len, by_name.values()))
    first, *others = (name for name, found in by_name.items() if len(found) == most)
    if others:
        raise UsageError(f"as many problems were swept on several devices: name one with --device: {known}")
    return first, [f"{first or 'not named'}, which has the most problems of {known}"] if len(by_name) > 1 else []


def _doubt(one: Tuned) -> str:
    """What to say where most configs disagree with what is taken for right, which may be the wrong one; else empty."""
    wrong = sum(status == Status.WRONG for status, _ in one.failures.values())
    if wrong <= len(one.times_us):
        return ""
    return (
        f"{one.problem.shape}: {wrong} of {wrong + len(one.times_us)} configs are wrong: see that what they were "
        "compared with is right, or sweep with --reference"
    )


def _document(text: str) -> tuple[Kernel, Launch]:
    try:
        document = json.loads(text)
        return recording.from_json(document["kernel"], Kernel), recording.from_json(document["launch"], Launch)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DatabaseError(f"a recorded launch is damaged ({error}): record the kernel and sweep it again") from None


def _of_one_kernel(
    found: Sequence[Candidates], documents: Mapping[Problem, tuple[Kernel, Launch]]
) -> tuple[Kernel | None, list[Candidates], list[str]]:
    """The kernel as it was recorded for the newest rows, and what was swept of that one: configs of another declaration
    have other numbers."""
    newest = max(found, key=lambda one: max(entry.newest for entry in one.entries))
    if newest.problem not in documents:
        return None, [one for one in found if one.problem not in documents], []
    kernel = documents[newest.problem][0]

    def is_same(one: Candidates) -> bool:
        other = documents[one.problem][0] if one.problem in documents else None
        return other is not None and (other.configs, other.key) == (kernel.configs, kernel.key)

    older = [one for one in found if not is_same(one)]
    why = "left out, recorded of a kernel with other configs or another key: record and sweep it again"
    return kernel, [one for one in found if is_same(one)], [f"{one.problem.shape} {why}" for one in older]


def _in_order(found: Sequence[Candidates], recorded: Sequence[Problem]) -> list[Candidates]:
    places = {problem: place for place, problem in enumerate(recorded)}
    return sorted(found, key=lambda one: places.get(one.problem, len(places)))  # stable: else the order of the ranking


def _tuned(store: Reader, found: Candidates, launch: Launch | None, recorded: Kernel | None) -> Tuned:
    winner, pick = found.winner, found.pick
    assert pick.config is not None  # usable ones name it
    is_published = found.kind is Kind.PUBLISHED
    subject = None if pick.version is None else Subject(pick.version, found.device, found.kind, found.problem)
    return Tuned(
        problem=found.problem,
        lookup_key=pick.lookup_key or NamedInts(),
        config=pick.config,
        launch_config=launched(recorded, pick.config),
        time_us=winner.time_us,
        times_us=found.times_us,
        evidence=_evidence(found, store.commit(subject) if subject else ""),
        verdict=winner.verdict or "",
        launch=launch,
        failures={} if is_published or subject is None else _failures(store, subject, found),
        is_published=is_published,
        check=pick.check,
        slowdowns=found.slowdowns,
    )


def _failures(store: Reader, subject: Subject, found: Candidates) -> dict[NamedInts, tuple[str, str]]:
    outcomes = store.tally(subject).outcomes
    return {
        config: (str(outcome.status), outcome.reason)
        for config, outcome in sorted(outcomes.items(), key=lambda item: item[0].canonical)
        if outcome.status is not Status.OK and config not in found.times_us
    }


def _evidence(found: Candidates, commit: str) -> str:
    """``certified, 12.34 us, 6 processes, NVIDIA H200, driver 580.1, triton 3.6.0, commit c0ffee, code 0123abcd``."""
    winner, device = found.winner, found.device
    pick = winner.evidence
    said = [
        winner.verdict or f"published by {pick.source}",
        f"{winner.time_us:.2f} us",
        f"{winner.n} process{'' if winner.n == 1 else 'es'}" if winner.verdict else "",
        device.name or device.arch,
        f"driver {device.driver}" if device.driver else "",
        f"triton {device.triton}" if device.triton else "",
        f"commit {commit}" if commit else "",
        f"code {pick.version.source_hash}" if pick.version else "",
    ]
    return visible(", ".join(filter(None, said)))
