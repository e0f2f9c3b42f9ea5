"""The texts that follow fields, enum members and module variables in the code."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from types import ModuleType
from typing import Any


@functools.cache
def of_attributes(owner: type[Any] | ModuleType) -> Mapping[str, str]:
    """Name -> the string that stands below its assignment, in a class or a module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body if inspect.ismodule(owner) else tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            for name in _assigned(statement):
                found[name] = inspect.cleandoc(after.value.value)
    return found


def _assigned(statement: ast.stmt) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]
