"""Output of a command is written once, whatever breaks it off."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import sys
from fp8tune.cli.streams import own_output

def interrupt(frame, event, argument):
    if event == "return" and frame.f_code.co_name == "write":
        sys.setprofile(None)
        raise KeyboardInterrupt  # as a signal's handler does, once the bytes are on their way

try:
    with own_output():
        print("first", flush=True)
        sys.setprofile(interrupt)
        print("second", flush=True)
except KeyboardInterrupt:
    pass
"""


def test_a_line_that_a_signal_broke_off_is_not_written_twice() -> None:
    printed = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["first", "second"]
