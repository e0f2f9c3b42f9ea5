"""Picks of one kernel on one device, which formats of others are written from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay import configs
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch, Value
from fp8tune.stats.study import Study


@dataclass(frozen=True)
class Pick:
    """The pick of one problem, with what was measured there."""

    study: Study
    evidence: str
    """One line: verdict, time, device, versions."""
    launch: Launch | None = None
    """The recorded launch; None for a kernel with a specification."""

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.study.problem

    @property
    def config(self) -> NamedInts:
        """The picked config."""
        return self.study.choice.pick

    @property
    def key(self) -> tuple[Value, ...]:
        """Key that the autotuner looks up; of a kernel with a specification, the values of its lookup key."""
        return self.launch.key if self.launch else tuple((self.study.lookup_key or NamedInts()).values())


@dataclass(frozen=True)
class KernelPicks:
    """All picks of one kernel on one device."""

    kernel: str
    device: Device
    picks: tuple[Pick, ...]
    """In the order of the recording, or of the shape sets."""
    recorded: Kernel | None = None
    """The recorded kernel without its launches."""
    notices: tuple[str, ...] = ()
    """Results that were left out, and the reason."""

    @property
    def bare_name(self) -> str:
        """Name of the kernel's function: ``module:attribute`` -> ``attribute``."""
        return self.kernel.rpartition(":")[2].rpartition(".")[2] or self.kernel

    def triton_config(self, config: NamedInts) -> Config:
        """Return a row's config as Triton takes it, its names in the order of the kernel's declaration.

        Raises:
            DatabaseError: A number stands for no value of the recorded kernel.
        """
        if self.recorded is None:
            options: dict[str, Any] = {name: config[name] for name in CONFIG_OPTIONS if name in config}
            if "maxnreg" in options:
                options["maxnreg"] = options["maxnreg"] or None  # 0 is no limit
            return Config({name: value for name, value in config.items() if name not in CONFIG_OPTIONS}, **options)
        try:
            decoded = configs.decoded(self.recorded, config)
        except (ValueError, TypeError) as error:
            raise DatabaseError(f"{error}: forget that row, or sweep the kernel again") from None
        names = dict.fromkeys(name for declared in self.recorded.configs for name in declared.kwargs)
        kwargs = {name: decoded.kwargs[name] for name in {**names, **decoded.kwargs} if name in decoded.kwargs}
        return replace(decoded, kwargs=kwargs)


def least_worst(picks: Sequence[Pick]) -> tuple[NamedInts, float]:
    """Choose one config for problems that a format does not distinguish.

    Returns:
        The config whose largest slowdown is least, among those with a time on the most problems, and that slowdown.
    """
    if len(picks) == 1:
        return picks[0].config, 1.0
    slowdowns: dict[NamedInts, list[float]] = {}
    for pick in picks:
        for config, slowdown in (pick.study.slowdowns or {pick.config: 1.0}).items():
            slowdowns.setdefault(config, []).append(slowdown)
    chosen = [pick.config for pick in picks]

    def preference(config: NamedInts) -> tuple[object, ...]:
        place = chosen.index(config) if config in chosen else len(chosen)
        return -len(slowdowns[config]), max(slowdowns[config]), place, config.canonical

    config = min(slowdowns, key=preference)
    return config, max(slowdowns[config])


def file_name(text: str) -> str:
    """Return the text as a name that cannot leave its folder and is not hidden; other characters become ``_``."""
    return re.sub(r"[^A-Za-z0-9_.,=()\[\] +-]+", "_", text).lstrip(".")[:200] or "_"
