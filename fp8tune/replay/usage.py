"""Find out which arguments a kernel reads and writes, and which hold addresses: asks a process that can compile."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fp8tune.errors import MachineError
from fp8tune.replay.recording import Kernel, Launch


class Use(NamedTuple):
    """Use of one argument by a kernel."""

    is_loaded: bool = False
    is_stored: bool = False
    """An atomic does both."""
    is_address: bool = False
    """True if the argument is an integer, or holds values, that become pointers."""


Usage = Mapping[str, Use]
"""Name -> the use of each pointer argument and of each 64-bit integer, which may be an address."""

Work = tuple[Kernel, Launch, Any]
"""A launch with its compiled code: (type of each argument, TTIR); None to compile it."""


def usages(work: Sequence[Work]) -> list[Usage]:
    """Return the use of arguments of launches, in their order; empty for a launch that does not compile.

    Raises MachineError where no process can compile, for example without Triton.
    """
    light = [(replace(kernel, launches=()), launch.without_values(), code) for kernel, launch, code in work]
    process = subprocess.run(
        [sys.executable, "-m", "fp8tune.replay.ttir"],
        input=pickle.dumps(light),
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        check=False,
    )
    try:
        answers = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        message = (process.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise MachineError(f"kernels cannot be compiled here: {message}: install torch and triton") from None
    return [{name: Use(*map(bool, use)) for name, use in answer.items()} for answer in answers]
