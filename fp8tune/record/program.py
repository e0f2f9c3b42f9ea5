"""The recorded program as a child process, and one recording of what its processes wrote."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8tune.autotuned import compiling
from fp8tune.autotuned.ir import addresses_in
from fp8tune.errors import Fp8tuneError, MachineError, UsageError
from fp8tune.record import process
from fp8tune.recording import Kernel, Launch, Recording, Scalar, merged, read
from fp8tune.redaction import redacted
from fp8tune.revisions import source
from fp8tune.stopping import Stopped


@dataclass(frozen=True)
class Ended:
    """The program has ended."""

    exit_code: int
    """As a shell has it: 128 and the signal's number for one that a signal ended."""
    recording: Recording | None
    """None where no process imported Triton."""


def run(command: Sequence[str], patterns: Sequence[str] = (), stdout: int | None = None) -> Ended:
    """Run a command and record the launches of all its Python processes.

    ``patterns``: bare kernels to record besides autotuned ones, as ``module:name`` or ``name`` with wildcards;
    ``stdout``: the descriptor that the program prints to. A signal that ends this process ends the program first.
    Raises UsageError for a command that cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="fp8tune-record-") as folder:
        environment = {**os.environ, process.FOLDER: folder, process.PATTERNS: "\n".join(patterns)}
        site_folder = str(Path(process.__file__).absolute().parent / "site")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (site_folder, os.environ.get("PYTHONPATH"))))
        exit_code = _ended(command, environment, stdout)
        parts = list(_parts(Path(folder)))
    if not parts:
        return Ended(exit_code, None)
    recording = merged([part for part in parts if part.kernels] or parts[:1])
    kernels = _with_usage([_completed(kernel) for kernel in recording.kernels])
    return Ended(exit_code, replace(recording, command=redacted(shlex.join(command)), kernels=tuple(kernels)))


def _ended(command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    """The exit code of a command, when it has ended."""
    try:
        child = subprocess.Popen(command, env=environment, stdout=stdout)
    except OSError as error:
        raise UsageError(
            f"cannot run {command[0]!r}: {error.strerror}: give a program, such as python train.py"
        ) from None
    try:
        code = child.wait()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():  # a terminal tells all processes itself
            child.send_signal(signal.SIGINT)
        _wait(child)
        return 130
    except Stopped as stopped:
        child.send_signal(getattr(signal, stopped.name))
        _wait(child)
        return stopped.exit_code
    return 128 - code if code < 0 else code


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Until a program that was told to end has ended; a second Ctrl-C ends it at once."""
    try:
        child.wait()
    except KeyboardInterrupt:
        child.kill()
        child.wait()


def _parts(folder: Path) -> Iterator[Recording]:
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(UsageError):  # cannot be: parts are replaced whole
            yield read(path)


def _completed(kernel: Kernel) -> Kernel:
    """The kernel as it is named from here, with the hash of its code."""
    name = _name(kernel)
    try:
        source_hash = "" if kernel.refusal else source.source_hash(name, source.installed(name))
    except (Fp8tuneError, OSError, SyntaxError, ValueError):
        source_hash = ""
    return replace(kernel, name=name, source_hash=source_hash)


def _name(kernel: Kernel) -> str:
    """``module:attribute``, or ``path.py:attribute`` where the module cannot be imported from this folder."""
    module, _, attribute = kernel.name.rpartition(":")
    file = Path(kernel.file)
    if module.endswith(".py"):
        return f"{_short(Path(module))}:{attribute}"
    if kernel.refusal or module.rpartition(".")[2] != (file.parent.name if file.stem == "__init__" else file.stem):
        return kernel.name
    top = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [*sys.path, str(Path.cwd())])
    places = [] if top is None else [*(top.submodule_search_locations or ()), *filter(None, (top.origin,))]
    if any(file.resolve().is_relative_to(Path(place).resolve()) for place in places):
        return kernel.name
    return f"{_short(file)}:{attribute}"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _with_usage(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels whose every tensor says whether it is read and written, as far as they can be compiled here."""
    wanted = [
        (kernel, launch)
        for kernel in kernels
        if not kernel.refusal
        for launch in kernel.launches
        if launch.addresses is None
        or any(not isinstance(one, Scalar) and one.is_stored is None for one in launch.arguments)
    ]
    if not wanted:
        return kernels
    try:
        usages = compiling.usages(wanted)
    except MachineError:
        return kernels
    found = {(kernel.name, launch.id): usage for (kernel, launch), usage in zip(wanted, usages, strict=True)}

    def with_usage(kernel: Kernel, launch: Launch) -> Launch:
        usage = found.get((kernel.name, launch.id))
        if usage is None:
            return launch
        arguments = tuple(
            one
            if isinstance(one, Scalar) or one.name not in usage
            else replace(one, is_loaded=usage[one.name].is_loaded, is_stored=usage[one.name].is_stored)
            for one in launch.arguments
        )
        return replace(launch, arguments=arguments, addresses=launch.addresses or addresses_in(usage))

    return [
        replace(kernel, launches=tuple(with_usage(kernel, launch) for launch in kernel.launches)) for kernel in kernels
    ]
