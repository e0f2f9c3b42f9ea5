"""Configs of an autotuned kernel as rows hold them, whole numbers by name, and as Triton takes them.

A name whose declared values are all integers keeps them. The values of any other name (flags, texts, dtypes) are
numbered in the order in which they are declared first. ``num_ctas`` and ``maxnreg`` are named only where a config sets
them; a ``maxnreg`` of 0 is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fp8tune.recording import CONFIG_OPTIONS, Config, Kernel, Value
from fp8tune.records import NamedInts


def encoded(kernel: Kernel, config: Config) -> NamedInts:
    """A declared config, or one with other integers, as rows hold it. Raises ValueError for a value nobody declared."""
    named = _named(kernel.configs)
    values = [(name, _number(named[name], value) if name in named else value) for name, value in config.kwargs.items()]
    options = [(option, getattr(config, option) or 0) for option in _options(kernel.configs)]
    return NamedInts([*values, *options])


def decoded(kernel: Kernel, config: NamedInts) -> Config:
    """The config as Triton takes it. Raises ValueError for a number that stands for nothing."""
    named = _named(kernel.configs)
    options: dict[str, Any] = {}
    kwargs: dict[str, Value] = {}
    for name, number in config.items():
        if name in CONFIG_OPTIONS:
            options[name] = number or None if name == "maxnreg" else number
        elif name not in named:
            kwargs[name] = number
        elif 0 <= number < len(named[name]):
            kwargs[name] = json.loads(named[name][number])
        else:
            raise ValueError(f"{name}={number} stands for no declared value of {kernel.name}")
    declared = next((one for one in kernel.configs if dict(one.kwargs) == kwargs), None)
    has_pre_hook = declared.has_pre_hook if declared else any(one.has_pre_hook for one in kernel.configs)
    return Config(kwargs, **options, has_pre_hook=has_pre_hook)


def axes(kernel: Kernel) -> Mapping[str, tuple[int, ...]]:
    """Name -> the values that occur in the declared configs, in the order in which they first do."""
    found: dict[str, dict[int, None]] = {}
    for config in kernel.configs:
        for name, value in encoded(kernel, config).items():
            found.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in found.items()}


def _named(configs: tuple[Config, ...]) -> dict[str, list[str]]:
    """Name -> the JSON of its values, for the names that not only integers are declared for."""
    values: dict[str, dict[str, None]] = {}
    for config in configs:
        for name, value in config.kwargs.items():
            values.setdefault(name, {})[json.dumps(value, sort_keys=True)] = None
    return {name: list(given) for name, given in values.items() if not _all_integers(given)}


def _all_integers(texts: Iterable[str]) -> bool:
    return all(type(json.loads(text)) is int for text in texts)


def _number(named: list[str], value: Value) -> int:
    return named.index(json.dumps(value, sort_keys=True))


def _options(configs: tuple[Config, ...]) -> tuple[str, ...]:
    optional = []
    if any(config.num_ctas != 1 for config in configs):
        optional.append("num_ctas")
    if any(config.maxnreg is not None for config in configs):
        optional.append("maxnreg")
    return ("num_warps", "num_stages", *optional)
