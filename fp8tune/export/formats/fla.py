"""flash-linear-attention's cache of configs: ``GPU/kernel.json``, its entries by the MD5 of the autotuner's key.

Specified by its reader, fla/ops/utils/cache.py (read in fla-core 0.6.0; MIT): ``AutotuneKey`` makes the key and its
hash, ``KernelConfigFile`` checks the file, ``load_cached_config`` looks up, ``CachedAutotuner`` launches. It reads no
field but ``autotune_entries``, ``default_config``, ``kernel_name``, ``triton_version`` and an entry's ``config`` and
``autotune_key``, so that ``evidence`` beside them changes nothing. ``FLA_CONFIG_DIR`` names the folder of a GPU,
``FLA_CACHE_MODE`` what is looked up: ``strict`` the key alone, ``full`` a similar key and then the default.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fp8tune.errors import UsageError
from fp8tune.export.formats import PublishedPick
from fp8tune.export.formats.compromise import least_worst
from fp8tune.export.formats.documents import (
    bare_name,
    check_launchable,
    config_of,
    evidence,
    file_name,
    parsed,
    text_of,
)
from fp8tune.export.given import File, Given, Tuned
from fp8tune.replay.recording import Config, Value
from fp8tune.text import visible


def write(given: Given) -> list[File]:
    """One file of all keys, with the config of least worst slowdown as the default.

    Problems of one key share a config. Raises UsageError for a kernel that was not recorded: only a recording has keys.
    """
    if not given.tuned:
        return []
    by_key: dict[str, list[Tuned]] = {}
    for one in given.tuned:
        if one.launch is None:
            raise UsageError(
                f"{given.kernel} has no recorded key, by which flash-linear-attention looks configs up: "
                "run fp8tune record, then sweep --recording"
            )
        by_key.setdefault(_text(given.kernel, one.launch.key), []).append(one)
    entries = {}
    for text, tuned in sorted(by_key.items()):
        config, _ = least_worst(tuned)
        entries[hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()] = {
            "autotune_key": json.loads(text),
            "config": _document(given.kernel, given.configs[config]),
            "evidence": [evidence(one) for one in tuned],
        }
    default, worst = least_worst(given.tuned)
    name = bare_name(given.kernel)
    document = {
        "kernel_name": name,
        "triton_version": given.device.triton,
        "autotune_entries": entries,
        "default_config": _document(given.kernel, given.configs[default]),
        "evidence": {"kernel": given.kernel, "device": given.device.name, "default_slowdown": round(worst, 4)},
    }
    return [File(PurePosixPath(gpu_name(given.device.name), file_name(name) + ".json"), text_of(document))]


def read(path: Path, kernel: str = "") -> list[PublishedPick]:
    """The entries of a file; its default, which is of no problem, is left out. Raises UsageError for a damaged one."""
    document = parsed(path)
    try:
        if not is_cache(document):
            raise ValueError("it has no autotune_entries")
        name = kernel or document.get("kernel_name") or path.stem
        entries = document["autotune_entries"]
        if not isinstance(name, str) or not isinstance(entries, dict):
            raise ValueError("kernel_name is no text, or autotune_entries no object")
        return [_pick(entry, name, path) for entry in entries.values()]
    except ValueError as error:
        raise UsageError(f"{visible(str(path))} is damaged: {visible(str(error))}") from None


def is_cache(document: object) -> bool:
    """Whether a JSON document is such a file."""
    return isinstance(document, dict) and "autotune_entries" in document and "default_config" in document


def gpu_name(name: str) -> str:
    """The folder of a GPU, as fla calls it."""
    return re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_") or "unknown_gpu"


def _text(kernel: str, key: tuple[Value, ...]) -> str:
    """The key as fla hashes it. Raises UsageError for one that it could not hash."""
    for value in key:
        if not isinstance(value, int | float | str | None):
            raise UsageError(
                f"the key of {kernel} holds {str(value)[:80]}, which is no JSON value: "
                "flash-linear-attention cannot look it up, use --for python"
            )
    return json.dumps(key, separators=(",", ":"), sort_keys=True)


def _document(kernel: str, config: Config) -> dict[str, Any]:
    check_launchable(kernel, config)
    return {
        "kwargs": dict(config.kwargs),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "num_ctas": config.num_ctas,
        "maxnreg": config.maxnreg,
    }


def _pick(entry: object, kernel: str, path: Path) -> PublishedPick:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("autotune_key"), list):
        raise ValueError(f"{str(entry)[:40]!r} has no autotune_key")
    given = entry.get("config")
    if not isinstance(given, Mapping) or not isinstance(given.get("kwargs"), Mapping):
        raise ValueError(f"{str(given)[:40]!r} is no config")
    options = {name: value for name, value in given.items() if name in ("num_warps", "num_stages", "num_ctas")}
    config = config_of({**given["kwargs"], **options, "maxnreg": given.get("maxnreg")})
    device = path.parent.name
    return PublishedPick(kernel, tuple(entry["autotune_key"]), config, None, path.name, device=device)
