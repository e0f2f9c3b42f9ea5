"""Run a program as a child process and make one recording of what its processes wrote."""

from __future__ import annotations

import importlib.machinery
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fp8tune.errors import Fp8tuneError, UsageError
from fp8tune.redaction import redacted
from fp8tune.replay.recording import Kernel, Launch, Recording, Tensor, merged, read
from fp8tune.replay.watch import process
from fp8tune.revisions import source
from fp8tune.stopping import Stopped
from fp8tune_kernels import tuners

Work = tuple[Kernel, Launch, Any]
"""A launch with its compiled code: (type of each argument, TTIR); None to compile it."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    exit_code: int  # 128 and the signal's number for a program that a signal ended, as in a shell
    recording: Recording | None  # None where no process imported Triton


def run(
    command: Sequence[str],
    patterns: Sequence[str] = (),
    stdout: int | None = None,
    asks_usage: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run a command and record the launches of all its Python processes.

    ``patterns``: kernels to record, as ``module:name`` or ``name`` with wildcards; without one, all autotuned kernels;
    ``stdout``: the descriptor that the program prints to; ``asks_usage``: compile the kernels to see which tensors they
    read and write, which takes seconds; ``variables``: more of its environment. A signal that ends this process ends
    the program first. Raises UsageError for a command that cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="fp8tune-record-") as folder:
        site = str(Path(process.__file__).absolute().parent / "site")
        environment = {
            **os.environ,
            process.FOLDER: folder,
            process.PATTERNS: "\n".join(patterns),
            process.KERNELS: str(Path(tuners.__file__).parent),
            "PYTHONPATH": os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH")))),
            **variables,
        }
        exit_code = _exit_code(command, environment, stdout)
        parts = [read(path) for path in sorted(Path(folder).glob("*.json"))]
    if not parts:
        return Ended(exit_code, None)
    recording = merged([part for part in parts if part.kernels] or parts[:1])
    wildcards = [pattern if ":" in pattern else f"*:{pattern}" for pattern in patterns] or ["*"]
    pairs = [(kernel, _as_seen_from_here(kernel)) for kernel in recording.kernels]
    kernels = [seen for kernel, seen in pairs if _is_named(wildcards, kernel.name, seen.name)]
    kernels = _with_usage(kernels, recording.codes) if asks_usage else kernels
    return Ended(exit_code, replace(recording, command=redacted(shlex.join(command)), kernels=tuple(kernels), codes={}))


def _is_named(wildcards: Sequence[str], *names: str) -> bool:
    """Return True if a wildcard matches one of a kernel's names. Those of a script may name it like a module."""
    scripts = [name.rpartition(":") for name in names if ".py:" in name]
    names = (*names, *(f"{Path(script).stem}:{attribute}" for script, _, attribute in scripts))
    return any(fnmatchcase(name, wildcard) for name in names for wildcard in wildcards)


def _exit_code(command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    """Run a command to its end and return its exit code."""
    try:
        child = subprocess.Popen(command, env=environment, stdout=stdout)
    except OSError as error:
        reason = f"cannot run {command[0]!r}: {error.strerror}"
        raise UsageError(f"{reason}: give a program, such as python train.py") from None
    try:
        code = child.wait()
        return 128 - code if code < 0 else code
    except KeyboardInterrupt:
        signal_number, exit_code = signal.SIGINT, 130
    except Stopped as stopped:
        signal_number, exit_code = signal.Signals[stopped.name], stopped.exit_code
    if signal_number != signal.SIGINT or not sys.stdin.isatty():  # a terminal sends Ctrl-C to all processes itself
        child.send_signal(signal_number)
    try:
        child.wait()
    except KeyboardInterrupt:  # the second Ctrl-C
        child.kill()
        child.wait()
    return exit_code


def _as_seen_from_here(kernel: Kernel) -> Kernel:
    """Return the kernel as it is named in this folder, with the hash of its code.

    The name is ``path.py:attribute`` where the module cannot be imported from here.
    """
    name, folder = kernel.name, Path.cwd()
    module, _, attribute = name.rpartition(":")
    file, is_script = Path(kernel.file), module.endswith(".py")
    if is_script:
        file = Path(module)
    elif not kernel.refusal and module.rpartition(".")[2] == (
        file.parent.name if file.stem == "__init__" else file.stem
    ):
        top = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [*sys.path, str(folder)])
        places = [] if top is None else [*(top.submodule_search_locations or ()), *filter(None, (top.origin,))]
        is_script = not any(file.resolve().is_relative_to(Path(place).resolve()) for place in places)
    if is_script:
        name = f"{file.relative_to(folder) if file.is_relative_to(folder) else file}:{attribute}"
    try:
        source_hash = "" if kernel.refusal else source.source_hash(name)
    except (Fp8tuneError, OSError, SyntaxError, ValueError):
        source_hash = ""
    return replace(kernel, name=name, source_hash=source_hash)


def usages(work: Sequence[Work]) -> list[dict[str, list[bool]]]:
    """Return the use of arguments of launches, as :class:`fp8tune.replay.ttir.Use`, in their order.

    Asks a process that can compile. Empty for a launch that does not compile, and for all where Triton is missing.
    """
    light = [(replace(kernel, launches=()), launch.without_values(), code) for kernel, launch, code in work]
    command = [sys.executable, "-m", "fp8tune.replay.ttir"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(command, input=pickle.dumps(light), env=environment, capture_output=True, check=False)
    try:
        answers: list[dict[str, list[bool]]] = json.loads(ended.stdout.splitlines()[-1])
        return answers
    except (ValueError, IndexError):
        return [{} for _ in work]


def _with_usage(kernels: list[Kernel], codes: Mapping[str, object]) -> list[Kernel]:
    """Return kernels whose every tensor says whether it is read and written, as far as they can be compiled here."""

    def is_asked(kernel: Kernel, launch: Launch) -> bool:
        may_point = any(isinstance(item, Tensor) or not item.is_constexpr for item in launch.arguments)
        return launch.code in codes or (not kernel.refusal and may_point)

    work = [(k, launch, codes.get(launch.code)) for k in kernels for launch in k.launches if is_asked(k, launch)]
    answers = zip(work, usages(work) if work else (), strict=True)
    uses_by_launch = {(kernel.name, launch.id): uses for (kernel, launch, _), uses in answers}

    def with_use(kernel: Kernel, launch: Launch) -> Launch:
        uses = uses_by_launch.get((kernel.name, launch.id))
        if not uses:
            return replace(launch, code="")

        def marked(tensor: Tensor) -> Tensor:
            is_loaded, is_stored = uses.get(tensor.name, (tensor.is_loaded, tensor.is_stored))[:2]
            return replace(tensor, is_loaded=is_loaded, is_stored=is_stored)

        addresses = tuple(name for name, (_, _, is_address) in uses.items() if is_address)
        return replace(launch.with_tensors(marked), addresses=addresses, code="")

    return [replace(kernel, launches=tuple(with_use(kernel, item) for item in kernel.launches)) for kernel in kernels]
