"""The command line: one file per command. Heavy imports happen inside the commands, so that ``--help`` is fast."""

from fp8tune.cli.program import main

__all__ = ["main"]
