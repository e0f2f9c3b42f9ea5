"""Configs of an autotuned kernel as rows hold them, whole numbers by name, and as Triton takes them.

A name whose declared values are all integers keeps them. The values of any other name (flags, texts, dtypes) are
numbered in the order in which they are declared first. Where ``early_config_prune`` makes configs, values that it adds
are numbered by their text, as which of them a recording has depends on its launches. ``num_ctas`` and ``maxnreg`` are
named only where a config sets them; a ``maxnreg`` of 0 is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fp8tune.autotuned.values import number
from fp8tune.recording import CONFIG_OPTIONS, Config, Kernel, Value
from fp8tune.records import NamedInts


def encoded(kernel: Kernel, config: Config) -> NamedInts:
    """A declared config, or one with other integers, as rows hold it. Raises ValueError for a value nobody declared."""
    named = _named(kernel.configs)
    values = [(name, _encoded(kernel, named.get(name), value)) for name, value in config.kwargs.items()]
    options = [(option, getattr(config, option) or 0) for option in _options((*kernel.configs, *kernel.pruner_configs))]
    return NamedInts([*values, *options])


def swept(kernel: Kernel) -> tuple[Config, ...]:
    """The configs of a sweep: as declared, or what the kernel makes of those."""
    return kernel.pruner_configs or kernel.configs


def _encoded(kernel: Kernel, declared: list[str] | None, value: Value) -> Value:
    """The number of a value whose name has these declared values; None: integers alone."""
    if declared is not None and not (kernel.pruner_configs and json.dumps(value, sort_keys=True) not in declared):
        return _number(declared, value)
    return value if type(value) is int or not kernel.pruner_configs else number(value)


def decoded(kernel: Kernel, config: NamedInts) -> Config:
    """The config as Triton takes it. Raises ValueError for a number that stands for nothing."""
    named = _named(kernel.configs)
    options: dict[str, Any] = {}
    kwargs: dict[str, Value] = {}
    for name, stored in config.items():
        if name in CONFIG_OPTIONS:
            options[name] = stored or None if name == "maxnreg" else stored
            continue
        made = [one.kwargs[name] for one in kernel.pruner_configs if name in one.kwargs]
        if name in named and 0 <= stored < len(named[name]):
            kwargs[name] = json.loads(named[name][stored])
        elif alike := [value for value in made if _encoded(kernel, named.get(name), value) == stored]:
            kwargs[name] = alike[0]
        elif name not in named:
            kwargs[name] = stored
        else:
            raise ValueError(f"{name}={stored} stands for no declared value of {kernel.name}")
    own = (*kernel.pruner_configs, *kernel.configs)
    declared = next((one for one in own if dict(one.kwargs) == kwargs), None)
    has_pre_hook = declared.has_pre_hook if declared else any(one.has_pre_hook for one in own)
    return Config(kwargs, **options, has_pre_hook=has_pre_hook)


def axes(kernel: Kernel) -> Mapping[str, tuple[int, ...]]:
    """Name -> the values that occur in the configs of a sweep, in the order in which they first do."""
    found: dict[str, dict[int, None]] = {}
    for config in swept(kernel):
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
