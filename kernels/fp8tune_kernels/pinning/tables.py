"""Read the tables that pins are called with: a file of an export, a folder of such files, or a dict.

A file is read as data. Nothing in it runs.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..tuners import decoded
from .errors import PinError, one_line
from .keys import Key, plain

FORMAT = 2
"""Version of the file. Files without one are older than it, and carry no identity."""

NAMES = frozenset({"FORMAT", "KERNEL", "KEY", "CODE", "TABLE", "UNCHECKED", "LAUNCHES", "HAS_OWN_INPUTS", "CHECKSUM"})
"""Names that are read in a file. Other statements are left alone, and none runs."""

LARGEST_WARPS, LARGEST_STAGES, LARGEST_CTAS, LARGEST_REGISTERS = 32, 64, 16, 255
"""A block has 1024 threads, and a thread 255 registers."""

_EXPORT = "fp8tune export --for python"


@dataclass(frozen=True)
class Table:
    """Configs of one kernel."""

    source: str
    devices: Mapping[str, Mapping[Key, Any]]
    """Device name, or ``""`` for every device -> key -> arguments of ``triton.Config``."""
    kernel: str = ""
    """``module:attribute``; empty for a dict."""
    names: tuple[str, ...] = ()
    """The arguments of a key."""
    codes: Mapping[str, str] = field(default_factory=dict)
    """Device name -> hash of the code that was swept. Without it nothing is known of the code."""
    launches: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    """Device name -> key -> launches of a bare kernel that the config was checked on."""
    unchecked: Mapping[str, Mapping[Key, Any]] = field(default_factory=dict)
    """Device name -> key -> reason why the config's outputs were not checked."""
    insists: bool = False
    """True if it is used with any code: ``stale="use"``."""

    def merged(self, second: Table) -> Table:
        """Return the devices of two files of one kernel. Raises PinError where both have the same."""
        if same := sorted({*self.devices} & {*second.devices}):
            pair = f"{self.source} and {second.source} are both of {self.kernel} on {same[0] or 'every device'}"
            raise PinError(f"{pair}: remove one")
        if self.names != second.names:
            pair = f"{self.source} and {second.source} have other keys of {self.kernel}"
            raise PinError(f"{pair}: export both again")
        return replace(
            self,
            devices={**self.devices, **second.devices},
            codes={**self.codes, **second.codes},
            launches={**self.launches, **second.launches},
            unchecked={**self.unchecked, **second.unchecked},
        )


def tables_of(table: Any) -> list[Table]:
    """Return what :func:`pin` is called with as a table for each kernel. Raises PinError."""
    if isinstance(table, Mapping):
        return [Table("a dict", {"": _checked("a dict", table)})]
    if not isinstance(table, str | os.PathLike):
        raise PinError(f"{table!r:.80} is no table: give a file of {_EXPORT}, its folder or a dict")
    if not (path := Path(table)).is_dir():
        return [_read(path)]
    tables: dict[str, Table] = {}
    for file in sorted(path.glob("*.py")):
        if "\nKERNEL = " in file.read_text(encoding="utf-8", errors="replace"):
            read = _read(file)
            tables[read.kernel] = tables[read.kernel].merged(read) if read.kernel in tables else read
    if not tables:
        raise PinError(f"no table is in {str(path)!r}: write one with {_EXPORT}")
    return list(tables.values())


def _read(path: Path) -> Table:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        names = parsed(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        raise PinError(f"{path} is no table that can be read: {one_line(error)}: write one with {_EXPORT}") from None
    if names.get("HAS_OWN_INPUTS"):
        fix = "call config_for of the file before you make them"
        raise PinError(f"{names['KERNEL']} of {path} cannot be pinned, its inputs depend on the config: {fix}")
    if ":" not in names["KERNEL"]:
        reason = f"{path} is of {names['KERNEL']}, which is a specification and no kernel of Triton"
        raise PinError(f"{reason}: call config_for of the file where you launch it")
    devices = {device: _checked(str(path), rows) for device, rows in names["TABLE"].items()}
    launches, unchecked = (
        {device: {plain(key): value for key, value in rows.items()} for device, rows in names.get(name, {}).items()}
        for name in ("LAUNCHES", "UNCHECKED")
    )
    kernel, key, codes = names["KERNEL"], names.get("KEY", ()), names.get("CODE", {})
    return Table(str(path), devices, kernel, key, codes, launches, unchecked)


def checksum(text: str) -> str:
    """Return the hash of all data in a file of an export: from its format to its checksum."""
    data = text.partition("\nFORMAT = ")[2].rpartition("\nCHECKSUM = ")[0]
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def parsed(text: str) -> dict[str, Any]:
    """Return the data in an exported file, by name. Raises ValueError for any other text, or a damaged one."""
    names: dict[str, Any] = {}
    try:
        for statement in ast.parse(text.replace("\r\n", "\n")).body:
            match statement:
                case ast.Assign(targets=[ast.Name(name)], value=value) if name in NAMES and name not in names:
                    names[name] = _value(value)
                case ast.FunctionDef():
                    pass
                case _ if any(isinstance(node, ast.Name) and node.id in NAMES for node in ast.walk(statement)):
                    raise ValueError(f"line {statement.lineno} changes its data")
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(one_line(error)) from None
    if "FORMAT" in names or "CHECKSUM" in names:
        if names.get("FORMAT") == FORMAT and names.pop("CHECKSUM", "") != checksum(text.replace("\r\n", "\n")):
            raise ValueError("it is damaged or was edited, its checksum is another")
        if names.get("FORMAT") != FORMAT:
            raise ValueError(f"its format {names.get('FORMAT')!r:.20} is not known: install the fp8tune that wrote it")
    if not isinstance(names.get("KERNEL"), str) or "TABLE" not in names:
        raise ValueError("it has no KERNEL or no TABLE")
    for name in ("TABLE", "CODE", "LAUNCHES", "UNCHECKED"):
        if not isinstance(devices := names.get(name, {}), dict):
            raise ValueError(f"{name} has no devices")
        if name != "CODE" and not all(isinstance(rows, dict) for rows in devices.values()):
            raise ValueError(f"{name} has no rows by key")
        if name in ("LAUNCHES", "UNCHECKED") and not all(
            isinstance(key, tuple) for row in devices.values() for key in row
        ):
            raise ValueError(f"{name} has a key that is no tuple")
    key = names.get("KEY", ())
    if not isinstance(key, tuple) or not all(isinstance(name, str) for name in key):
        raise ValueError("KEY holds no names")
    return names


def _value(node: ast.expr) -> Any:
    """Return a literal; a dtype of torch or ``tl`` as :func:`fp8tune_kernels.tuners.decoded` reads it."""
    match node:
        case ast.Attribute(ast.Name("torch" | "tl" as module), name):
            return {"dtype": f"{module}.{name}"}
        case ast.Call(ast.Name("float"), [ast.Constant(str(text))], []):
            return float(text)
        case ast.Dict(keys, values):
            pairs = [(_hashable(_value(key)), _value(value)) for key, value in zip(keys, values, strict=True) if key]
            if len(dict(pairs)) < len(keys):
                raise ValueError(f"line {node.lineno} has a key twice")
            return dict(pairs)
        case ast.Tuple(items):
            return tuple(map(_value, items))
    return ast.literal_eval(node)


def _hashable(key: Any) -> Any:
    """Return a key of a dict with dtypes as the text that a launch has of them."""
    if isinstance(key, tuple):
        return tuple(map(_hashable, key))
    return str(decoded(key)) if isinstance(key, dict) else key


def _checked(source: str, rows: Mapping[Any, Any]) -> dict[Key, Any]:
    """Return the rows of a device with plain keys. Raises PinError for what no launch or kernel can have."""
    result = {}
    for key, row in rows.items():
        reason = "a key is no tuple" if not isinstance(key, tuple) else _impossible(row)
        if any(isinstance(item, float) and math.isnan(item) for item in (key if isinstance(key, tuple) else ())):
            reason = "a key holds NaN, which equals nothing"
        if reason:
            raise PinError(f"{source} has a row that cannot be used: {reason}: export it again")
        result[plain(key)] = row
    return result


def _impossible(row: Any) -> str:
    """Return the reason why ``triton.Config`` cannot take a row; empty if it can."""
    if not isinstance(row, Mapping) or not isinstance(row.get("kwargs"), Mapping):
        return f"{row!r:.60} is no config"
    warps = [2**power for power in range(LARGEST_WARPS.bit_length())]
    ctas = [2**power for power in range(LARGEST_CTAS.bit_length())]
    possible = {
        "num_warps": (warps, f"a power of two up to {LARGEST_WARPS}"),
        "num_stages": (range(LARGEST_STAGES + 1), f"0 to {LARGEST_STAGES}"),
        "num_ctas": (ctas, f"a power of two up to {LARGEST_CTAS}"),
        "maxnreg": (range(1, LARGEST_REGISTERS + 1), f"1 to {LARGEST_REGISTERS}"),
    }
    for name, value in row.items():
        if name != "kwargs" and name not in possible:
            return f"{name!r} is no option of a config"
        if name == "kwargs" or (name == "maxnreg" and value is None):
            continue
        values, text = possible[name]
        if type(value) is not int or value not in values:
            return f"{name}={value!r:.20} is not {text}"
    return ""
