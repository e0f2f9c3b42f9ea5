"""A bare ``@triton.jit`` kernel as an autotuned one: what its callers give is its configs."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from fp8tune.recording import Config, Kernel, Launch, Scalar

OPTIONS = {one.name for one in dataclasses.fields(Config)} - {"kwargs", "has_pre_hook"}


def as_autotuned(kernel: Kernel) -> Kernel:
    """The kernel with a config for each launch: its options, the constants that its grid reads, and its block sizes.

    Launches that differ in nothing else become one, which has all their configs.
    """
    tunable = {name for launch in kernel.launches for name in (*launch.grid.axes, *_blocks(launch))} - OPTIONS
    launches: dict[str, Launch] = {}
    for launch in kernel.launches:
        config = _config(launch, tunable)
        arguments = tuple(one for one in launch.arguments if one.name not in config.kwargs)
        options = {name: value for name, value in launch.options.items() if name not in OPTIONS}
        made = replace(launch, arguments=arguments, options=options, configs=(config,))
        held = launches.get(made.id)
        launches[made.id] = made if held is None else _one(held, made)
    configs: list[Config] = []
    for config in (config for launch in launches.values() for config in launch.configs or ()):
        configs += [config] if config not in configs else []
    return replace(kernel, configs=tuple(configs), launches=tuple(launches.values()))


def _blocks(launch: Launch) -> list[str]:
    constants = (one for one in launch.arguments if isinstance(one, Scalar) and one.is_constexpr)
    return [one.name for one in constants if type(one.value) is int and "BLOCK" in one.name.upper()]


def _config(launch: Launch, tunable: set[str]) -> Config:
    given = {one.name: one.value for one in launch.arguments if isinstance(one, Scalar)}
    asked = dict(zip(launch.grid.axes, launch.grid.table[0][0], strict=True))  # its own first; defaults are in no call
    kwargs = {name: value for name, value in {**given, **asked}.items() if name in tunable}
    options: dict[str, Any] = {name: value for name, value in launch.options.items() if name in OPTIONS}
    return Config(kwargs, **options)


def _one(held: Launch, other: Launch) -> Launch:
    """Launches of one id: their programs are as many for the same constants."""
    entries = [*held.grid.table, *(entry for entry in other.grid.table if entry not in held.grid.table)]
    listed = (*(held.configs or ()), *(one for one in other.configs or () if one not in (held.configs or ())))
    grid = replace(held.grid, table=tuple(entries))
    return replace(held, grid=grid, configs=listed, count=held.count + other.count)
