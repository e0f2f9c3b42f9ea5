"""Functions that run in processes of their own, beside each other."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence

from fp8tune.errors import DatabaseError


def begun(number: int, work: Callable[[int], object]) -> list[int]:
    """Run ``work(0)``, ``work(1)`` and so on, each in a process; their ids."""
    children = []
    for index in range(number):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(index)
                code = 0
            except DatabaseError as error:
                os.write(2, f"{error}\n".encode())
                code = 2
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        children.append(child)
    return children


def ended(children: Sequence[int]) -> list[int]:
    """Wait for processes; their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def together(number: int, work: Callable[[int], object]) -> list[int]:
    """Run beside each other to the end; the exit codes."""
    return ended(begun(number, work))
