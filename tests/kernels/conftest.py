"""What tests of kernels share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import environment


@pytest.fixture(scope="session")
def compiling(once_a_run: Callable[[str, Callable[[], str]], str]) -> dict[str, Any]:
    """What the checks of ``without_interpreter.py`` found, by name."""

    def found() -> str:
        script = Path(__file__).with_name("without_interpreter.py")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    return json.loads(once_a_run("found without the interpreter", found))  # type: ignore[no-any-return]
