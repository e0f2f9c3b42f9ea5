"""Configs of a recorded kernel, as rows hold them (whole numbers by name) and as Triton takes them.

A name whose declared values are all integers keeps them. The values of any other name (flags, texts, dtypes) are
numbered in the order in which they are declared first. Where ``early_config_prune`` makes configs, values that it adds
are numbered by their text, as which of them a recording has depends on its launches. ``num_ctas`` and ``maxnreg`` are
named only where a config sets them; a ``maxnreg`` of 0 is none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8tune.records import NamedInts
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch, Scalar, Value
from fp8tune.replay.values import number


def encoded(kernel: Kernel, config: Config) -> NamedInts:
    """Return a declared config, or one with other integers, as rows hold it. Raises ValueError for other values."""
    numbered = _numbered(kernel.configs)
    values = [(name, _encoded(kernel, numbered.get(name), value)) for name, value in config.kwargs.items()]
    every = (*kernel.configs, *kernel.pruner_configs)
    optional = {"num_ctas": any(item.num_ctas != 1 for item in every), "maxnreg": any(item.maxnreg for item in every)}
    options = ("num_warps", "num_stages", *(name for name, is_set in optional.items() if is_set))
    return NamedInts([*values, *((option, getattr(config, option) or 0) for option in options)])


def _encoded(kernel: Kernel, declared: list[str] | None, value: Value) -> Value:
    """Return the number of a value whose name has these declared values; None: integers alone."""
    text = json.dumps(value, sort_keys=True)
    if declared is not None and not (kernel.pruner_configs and text not in declared):
        return declared.index(text)
    return value if type(value) is int or not kernel.pruner_configs else number(value)


def swept(kernel: Kernel) -> tuple[Config, ...]:
    """Return the configs of a sweep: as declared, or what the kernel makes of those."""
    return kernel.pruner_configs or kernel.configs


def decoded(kernel: Kernel, config: NamedInts) -> Config:
    """Return the config as Triton takes it. Raises ValueError for a number that stands for nothing."""
    numbered = _numbered(kernel.configs)
    options: dict[str, Any] = {}
    kwargs: dict[str, Value] = {}
    for name, stored in config.items():
        if name in CONFIG_OPTIONS:
            options[name] = stored or None if name == "maxnreg" else stored
            continue
        made = [item.kwargs[name] for item in kernel.pruner_configs if name in item.kwargs]
        if name in numbered and 0 <= stored < len(numbered[name]):
            kwargs[name] = json.loads(numbered[name][stored])
        elif alike := [value for value in made if _encoded(kernel, numbered.get(name), value) == stored]:
            kwargs[name] = alike[0]
        elif name not in numbered:
            kwargs[name] = stored
        else:
            raise ValueError(f"{name}={stored} stands for no declared value of {kernel.name}")
    own = (*kernel.pruner_configs, *kernel.configs)
    declared = next((item for item in own if dict(item.kwargs) == kwargs), None)
    has_pre_hook = declared.has_pre_hook if declared else any(item.has_pre_hook for item in own)
    return Config(kwargs, **options, has_pre_hook=has_pre_hook)


def axes(kernel: Kernel) -> Mapping[str, tuple[int, ...]]:
    """Return name -> the values that occur in the configs of a sweep, in the order in which they first do."""
    result: dict[str, dict[int, None]] = {}
    for config in swept(kernel):
        for name, value in encoded(kernel, config).items():
            result.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in result.items()}


def _numbered(configs: tuple[Config, ...]) -> dict[str, list[str]]:
    """Return name -> the JSON of its values, for the names that not only integers are declared for."""
    values: dict[str, dict[str, bool]] = {}
    for name, value in (item for config in configs for item in config.kwargs.items()):
        values.setdefault(name, {})[json.dumps(value, sort_keys=True)] = type(value) is int
    return {name: list(given) for name, given in values.items() if not all(given.values())}


OPTIONS = {item.name for item in dataclasses.fields(Config)} - {"kwargs", "has_pre_hook"}


def as_autotuned(kernel: Kernel) -> Kernel:
    """Return a bare ``@triton.jit`` kernel with a config for each launch.

    A config has the options of the launch, the constants that its grid reads, and its block sizes where the grid
    follows them. Launches that differ in nothing else become one, which has all their configs. The sizes of launches
    are the key.
    """
    tunable = {name for launch in kernel.launches for name in (*launch.grid.axes, *_blocks(launch))} - OPTIONS
    launches: dict[str, Launch] = {}
    for launch in kernel.launches:
        config = _config(launch, tunable)
        arguments = tuple(item for item in launch.arguments if item.name not in config.kwargs)
        options = {name: value for name, value in launch.options.items() if name not in OPTIONS}
        made = replace(launch, arguments=arguments, options=options, configs=(config,))
        launches[made.id] = _joined(launches[made.id], made) if made.id in launches else made
    configs: list[Config] = []
    for config in (config for launch in launches.values() for config in launch.configs or ()):
        configs += [config] if config not in configs else []
    key = [name for launch in launches.values() for name, value in launch.scalars.items() if is_size(name, value)]
    made_launches = tuple(replace(launch, key=_key(launch, key)) for launch in launches.values())
    return replace(kernel, configs=tuple(configs), key=tuple(dict.fromkeys(key)), launches=made_launches)


def is_size(name: str, value: Value) -> bool:
    """Return True for an integer argument that is no stride."""
    return type(value) is int and 0 <= value < 2**31 and "stride" not in name.lower()


def _key(launch: Launch, names: Sequence[str]) -> tuple[Value, ...]:
    scalars = launch.scalars
    dtypes = (f"torch.{item.dtype}" for item in launch.tensors)
    return (*(scalars[name] for name in dict.fromkeys(names) if name in scalars), *dtypes)


def _blocks(launch: Launch) -> list[str]:
    """Return the block sizes that a grid can follow: with a fixed one, another block needs other programs."""
    if not launch.grid.axes:
        return []
    constants = (item for item in launch.arguments if isinstance(item, Scalar) and item.is_constexpr)
    return [item.name for item in constants if type(item.value) is int and "BLOCK" in item.name.upper()]


def _config(launch: Launch, tunable: set[str]) -> Config:
    given = launch.scalars
    own = dict(
        zip(launch.grid.axes, launch.grid.table[0][0], strict=True)
    )  # its own come first; defaults are no arguments
    kwargs = {name: value for name, value in {**given, **own}.items() if name in tunable}
    options: dict[str, Any] = {name: value for name, value in launch.options.items() if name in OPTIONS}
    return Config(kwargs, **options)


def _joined(first: Launch, other: Launch) -> Launch:
    """Join launches of one id: their programs are as many for the same constants."""
    entries = [*first.grid.table, *(entry for entry in other.grid.table if entry not in first.grid.table)]
    listed = (*(first.configs or ()), *(item for item in other.configs or () if item not in (first.configs or ())))
    grid = replace(first.grid, table=tuple(entries))
    return replace(first, grid=grid, configs=listed, count=first.count + other.count)
