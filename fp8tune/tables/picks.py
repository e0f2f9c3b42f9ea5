"""Picks of one kernel on one device: the input to the export formats for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8tune.errors import DatabaseError
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay import configs
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch, Value
from fp8tune.stats.shared import choose_shared
from fp8tune.stats.study import Study


@dataclass(frozen=True)
class Pick:
    """Picked config of one problem, with its study."""

    study: Study
    evidence: str  # one line with verdict, time, device and versions
    launch: Launch | None = None  # recorded launch; None for a kernel with a specification

    @property
    def problem(self) -> Problem:
        """Problem of the config."""
        return self.study.problem

    @property
    def config(self) -> NamedInts:
        """Config that was picked for the problem."""
        return self.study.choice.pick

    @property
    def key(self) -> tuple[Value, ...]:
        """Key that the autotuner looks up, or the values of the lookup key for a kernel with a specification."""
        return self.launch.key if self.launch else tuple((self.study.lookup_key or NamedInts()).values())

    def by_launch(self) -> list[Pick]:
        """Return the pick for each of the launches that share its config: they may have different keys."""
        launches = (self.launch, *self.launch.shared) if self.launch else (None,)
        return [replace(self, launch=launch) for launch in launches]


@dataclass(frozen=True)
class KernelPicks:
    """All picks of one kernel on one device."""

    kernel: str
    device: Device
    picks: tuple[Pick, ...]  # in the order of the recording, or of the shape sets
    recorded: Kernel | None = None  # recorded kernel without its launches; None for a kernel with a specification
    notices: tuple[str, ...] = ()  # omitted results, each with the reason

    @property
    def bare_name(self) -> str:
        """Function name of the kernel, such as ``attribute`` for ``module:attribute``."""
        return self.kernel.rpartition(":")[2].rpartition(".")[2] or self.kernel

    @property
    def code(self) -> str:
        """Hash of the code that was measured; empty where nothing but publications is known."""
        return next((pick.study.source_hash for pick in self.picks if pick.study.source_hash), "")

    @property
    def is_bare(self) -> bool:
        """True for a recorded kernel without an autotuner, whose callers pass its constants."""
        return self.recorded is not None and not self.recorded.is_autotuned

    def declares(self, config: Config) -> bool:
        """Return True for a config that the kernel itself lists."""
        if self.recorded is None:
            return True
        plain = replace(config, has_pre_hook=False)
        return not self.is_bare and any(replace(item, has_pre_hook=False) == plain for item in self.recorded.configs)

    def triton_config(self, config: NamedInts) -> Config:
        """Return a stored config as a Triton config, with names in the order in which the kernel declares them."""
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


def shared_config(picks: Sequence[Pick]) -> NamedInts:
    """Return the config with the smallest worst slowdown on problems that a format does not distinguish.

    The pick of all of them stays if they agree, as launches that share a config do.
    """
    agree = all(pick.config == picks[0].config for pick in picks)
    shared = None if agree else choose_shared([pick.study for pick in picks], bound=1.0)
    return shared.config if shared else picks[0].config
