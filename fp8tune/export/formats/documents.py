"""What all formats in JSON share: the text of a file, names that stay in their folder, configs in one mapping."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8tune.errors import UsageError, one_line
from fp8tune.export.given import Tuned
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Value
from fp8tune.text import visible

LARGEST_BYTES = 2**26
"""No file of configs is larger."""


def text_of(document: object) -> str:
    """The text of a file: the same for equal documents."""
    return json.dumps(document, indent=4, allow_nan=False) + "\n"


def parsed(path: Path) -> Any:
    """What a JSON file holds. Raises UsageError for one that cannot be read."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError(f"{visible(str(path))} is larger than {LARGEST_BYTES >> 20} MiB: no file of configs is")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{visible(str(path))} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{visible(str(path))} is not JSON: {one_line(error)}") from None


def file_name(text: str) -> str:
    """The text as a name that cannot leave its folder, nor is hidden: other characters become ``_``."""
    name = re.sub(r"[^A-Za-z0-9_.,=()\[\] +-]+", "_", text).lstrip(".")[:200]
    return name or "_"


def bare_name(kernel: str) -> str:
    """The function's own name: ``module:attribute`` -> ``attribute``."""
    return kernel.rpartition(":")[2].rpartition(".")[2] or kernel


def device_file_name(name: str) -> str:
    """A device as file names have it: blanks become ``_``. Raises UsageError where the database names none."""
    if not name:
        raise UsageError("the database does not name the device: the format's file names need it, sweep on the GPU")
    return file_name(name.replace(" ", "_"))


def check_launchable(kernel: str, config: Config) -> None:
    """Raise UsageError for a config that is more than values: a format of values alone cannot say it."""
    if config.has_pre_hook:
        raise UsageError(f"the configs of {kernel} have a pre_hook, which is no value: use fp8tune.pin")
    for name, value in config.kwargs.items():
        if isinstance(value, Mapping):
            raise UsageError(f"{name} of {kernel} is no JSON value, which this format cannot hold: use --for python")


def flat(kernel: str, config: Config) -> dict[str, Value]:
    """The config as keyword arguments of a launch. Raises UsageError for one that is more than values."""
    check_launchable(kernel, config)
    return {**config.kwargs, **config.options}


def config_of(arguments: object) -> Config:
    """The config of keyword arguments of a launch. Raises ValueError for what is none."""
    if not isinstance(arguments, dict) or not arguments:
        raise ValueError(f"{str(arguments)[:40]!r} is no config")
    options = {name: arguments[name] for name in CONFIG_OPTIONS if arguments.get(name) is not None}
    for name, value in options.items():
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a number above 0")
    kwargs = {name: value for name, value in arguments.items() if name not in CONFIG_OPTIONS}
    for name, value in kwargs.items():
        if not isinstance(value, int | float | str | None):
            raise ValueError(f"{name} is {str(value)[:40]!r}, not one value")
    return Config(kwargs, **options)


def evidence(tuned: Tuned) -> dict[str, object]:
    """What a reader may want to know of one pick."""
    problem = tuned.problem
    said = {"shape": dict(problem.shape), "layout": problem.input_layout, "routing": problem.routing}
    return {**said, "dtype": problem.in_dtype, "evidence": tuned.evidence, "check": tuned.check}
