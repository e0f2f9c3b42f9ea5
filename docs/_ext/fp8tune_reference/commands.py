"""Every command with its usage, options and examples."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from fp8tune import cli
from fp8tune.commands.options import declared, placeholder, shown_default
from fp8tune.options import Argument, Example, Group, Option
from fp8tune.sweeping.options import LISTS
from fp8tune_reference.markdown import code, marked, needed, prose, sections, table

Function = Callable[..., None]

_SPLIT = re.compile(r"[,;] ")


def part() -> str:
    """A section for each command, under the headings of ``fp8tune --help``."""
    return sections(*(sections(f"## {heading}", *map(section, found)) for heading, found in _grouped().items()))


def overview() -> str:
    """A line for each command."""
    found = [(code(f"fp8tune {name(one)}"), marked(_paragraphs(one)[0])) for one in functions()]
    return table(["command", "what it does"], found)


def functions() -> list[Function]:
    """The commands, in the order of ``--help``."""
    return [one for found in _grouped().values() for one in found]


def name(function: Function) -> str:
    """What it is called by."""
    return function.__name__.strip("_").replace("_", "-")


def section(function: Function) -> str:
    """One command. Raises UndocumentedError for it or an option without a text."""
    called = f"fp8tune {name(function)}"
    given = [one for one in declared(function) if isinstance(_said(one), Argument)]
    usage = " ".join([called, "[OPTIONS]", *(_said(one).metavar or one.name.upper() for one in given)])
    examples: Sequence[Example] = getattr(function, "examples", ())
    lists = LISTS if name(function) == "sweep" else ()
    return sections(
        f"### `{called}`",
        *map(marked, _paragraphs(function)),
        f"```text\n{usage}\n```",
        *_options(function),
        *(f"**{heading}**: {', '.join(map(code, _SPLIT.split(names)))}." for heading, names in lists),
        "```bash\n" + "\n\n".join(f"# {one.what}\n{one.command}" for one in examples) + "\n```" if examples else "",
    )


def _grouped() -> Mapping[str, list[Function]]:
    return {heading: [_function(module) for module in modules] for heading, modules in cli.COMMANDS.items()}


def _function(module: Any) -> Function:
    function: Function = getattr(module, module.__name__.rpartition(".")[2])  # named as its module
    return function


def _options(function: Function) -> Iterator[str]:
    rows: dict[str, list[tuple[str, ...]]] = {str(group): [] for group in Group}
    for one in declared(function):
        said = _said(one)
        rows[str(Group.WHAT if isinstance(said, Argument) else said.group)].append(_option(name(function), one))
    for heading, found in rows.items():
        if found:
            yield table([heading, "type", "default", "meaning"], found)


def _option(command: str, one: inspect.Parameter) -> tuple[str, ...]:
    said, type = _said(one), get_args(one.annotation)[0]
    is_required = one.default is inspect.Parameter.empty
    if isinstance(said, Argument):
        shown, default = said.metavar or one.name.upper(), ""
    else:
        shown = said.flag if type is bool else f"{said.flag} {placeholder(said, type)}"
        default = "" if is_required else shown_default(said, one.default)
    text = needed(said.help, f"{shown} of {command}")
    return code(shown), _type(type, said), "required" if is_required else _as_code(default), marked(prose(text))


def _as_code(default: str) -> str:
    """A value as code, a phrase as it is."""
    return default if " " in default else code(default)


def _said(one: inspect.Parameter) -> Any:
    return next(each for each in get_args(one.annotation) if isinstance(each, Option | Argument))


def _type(type: Any, said: Option | Argument) -> str:
    inner = next((each for each in (type, *get_args(type)) if inspect.isclass(each)), str)
    if type is bool:
        return "flag"
    if getattr(type, "__origin__", None) is tuple:
        return "text, repeatable"
    if issubclass(inner, enum.Enum):
        return "one of those" if "|" in _placeholder(said, type) else " or ".join(map(code, inner))
    return {int: "integer", float: "number"}.get(inner, "path" if inner.__name__ == "Path" else "text")


def _placeholder(said: Option | Argument, type: Any) -> str:
    """What stands for the value."""
    return placeholder(said, type) if isinstance(said, Option) else said.metavar or ""


def _paragraphs(function: Function) -> list[str]:
    text = inspect.cleandoc(needed(function.__doc__ or "", name(function)))
    return [prose(paragraph) for paragraph in text.split("\n\n")]
