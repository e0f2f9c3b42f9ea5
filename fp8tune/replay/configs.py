"""Configs of a recorded kernel, as rows hold them (whole numbers by name) and as Triton takes them.

A name whose declared values are all integers keeps them. The values of any other name (flags, texts, dtypes) are
numbered in the order in which they are declared first. Where ``early_config_prune`` makes configs, values that it adds
are numbered by their text, as which of them a recording has depends on its launches. ``num_ctas`` and ``maxnreg`` are
named only where a config sets them; a ``maxnreg`` of 0 is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8tune.records import NamedInts
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch, Scalar, Value, distinct, merged_by
from fp8tune.replay.values import number

_BLOCK = re.compile(r"BLOCK|^GROUP_(SIZE_)?M$")
"""Names of block sizes, and of the number of row blocks in a group, as in Triton's tutorial of ``tl.dot``."""


def encoded(kernel: Kernel, config: Config) -> NamedInts:
    """Return a declared config, or one with other integers, as rows hold it. Raises ValueError for other values."""
    every = (*kernel.configs, *kernel.pruner_configs)
    result = {name: _number(kernel, name, value) for name, value in config.kwargs.items()}
    result |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    result |= {"num_ctas": config.num_ctas} if any(item.num_ctas != 1 for item in every) else {}
    return NamedInts(result | ({"maxnreg": config.maxnreg or 0} if any(item.maxnreg for item in every) else {}))


def _number(kernel: Kernel, name: str, value: Value) -> Any:
    """Return a config's value as a number; integers stay where no other values are declared for the name."""
    if (declared := kernel.numbered.get(name)) is not None:
        text = json.dumps(value, sort_keys=True)
        if text in declared or not kernel.pruner_configs:
            return declared.index(text)
    return value if type(value) is int or not kernel.pruner_configs else number(value)


def decoded(kernel: Kernel, config: NamedInts) -> Config:
    """Return the config as Triton takes it. Raises ValueError for a number that stands for nothing."""
    every = (*kernel.configs, *kernel.pruner_configs)
    options: dict[str, Any] = {name: value for name, value in config.items() if name in CONFIG_OPTIONS}
    options |= {"maxnreg": options.get("maxnreg") or None}
    kwargs: dict[str, Value] = {}
    for name in (name for name in config if name not in options):
        values = (item.kwargs[name] for item in every if name in item.kwargs)
        matching = [value for value in values if _number(kernel, name, value) == config[name]]
        if not matching and name in kernel.numbered:
            raise ValueError(f"{name}={config[name]} stands for no declared value of {kernel.name}")
        kwargs[name] = matching[0] if matching else config[name]
    hooks = [item.has_pre_hook for item in (*kernel.pruner_configs, *kernel.configs) if item.kwargs == kwargs]
    return Config(kwargs, **options, has_pre_hook=hooks[0] if hooks else any(item.has_pre_hook for item in every))


def swept(kernel: Kernel) -> tuple[Config, ...]:
    """Return the configs of a sweep: as declared, or what the kernel makes of those."""
    return kernel.pruner_configs or kernel.configs


def axes(kernel: Kernel) -> Mapping[str, tuple[int, ...]]:
    """Return name -> the values that occur in the configs of a sweep, in the order in which they first do."""
    result: dict[str, dict[int, None]] = {}
    for name, value in (item for config in swept(kernel) for item in encoded(kernel, config).items()):
        result.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in result.items()}


def as_autotuned(kernel: Kernel) -> Kernel:
    """Return a bare ``@triton.jit`` kernel with a config for each launch.

    A config has the options of the launch and the constants that may vary in any launch. Launches that differ in
    nothing else become one, which has all their configs, those launched most often first. The sizes of launches are
    the key.
    """
    tunable = set[str]()
    for launch in kernel.launches:
        constants = [item for item in launch.arguments if isinstance(item, Scalar) and item.is_constexpr]
        integers = (item.name for item in constants if type(item.value) is int)
        tunable.update(launch.grid.axes, (name for name in integers if may_vary(launch, name)))
    split = [_with_config(launch, tunable - {*CONFIG_OPTIONS}) for launch in kernel.launches]
    merged = merged_by(sorted(split, key=lambda launch: -launch.count), lambda launch: launch.id)
    by_id = {launch.id: launch for launch in merged}
    launches = [by_id[id] for id in dict.fromkeys(launch.id for launch in split)]
    sizes = dict.fromkeys(name for launch in launches for name, value in launch.scalars.items() if is_size(name, value))

    def with_key(launch: Launch) -> Launch:
        values = (launch.scalars[name] for name in sizes if name in launch.scalars)
        return replace(launch, key=(*values, *(f"torch.{item.dtype}" for item in launch.tensors)))

    configs = distinct(config for launch in launches for config in launch.configs or ())
    return replace(kernel, configs=configs, key=tuple(sizes), launches=tuple(map(with_key, launches)))


def may_vary(launch: Launch, name: str) -> bool:
    """Return True if a launch may get another value of a constant: its grid follows it.

    Beside such a constant, block sizes and the number of blocks in a group may vary, too. With a fixed grid, another
    block needs other programs.
    """
    return name in launch.grid.axes or (bool(launch.grid.axes) and bool(_BLOCK.search(name.upper())))


def is_size(name: str, value: Value) -> bool:
    """Return True for an integer argument that is no stride."""
    return type(value) is int and 0 <= value < 2**31 and "stride" not in name.lower()


def _with_config(launch: Launch, tunable: set[str]) -> Launch:
    """Return a launch with a config of its constants and options instead of these."""
    grid_values = dict(zip(launch.grid.axes, launch.grid.table[0][0], strict=True))  # defaults are no arguments
    kwargs = {name: value for name, value in {**grid_values, **launch.scalars}.items() if name in tunable}
    options: dict[str, Any] = {name: value for name, value in launch.options.items() if name in CONFIG_OPTIONS}
    return replace(
        launch,
        arguments=tuple(item for item in launch.arguments if item.name not in kwargs),
        options={name: value for name, value in launch.options.items() if name not in options},
        configs=(Config(kwargs, **options),),
    )
