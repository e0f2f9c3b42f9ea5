"""Typer commands built from :mod:`fp8tune.cli.commands` and the options dataclasses, so that nothing is said twice."""

from __future__ import annotations

import importlib
import inspect
import keyword
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from fp8tune.cli import databases
from fp8tune.cli.commands import COMMANDS, EPILOG, GROUPS, HELP, Command
from fp8tune.options import Option

SETTINGS = {"help_option_names": ["-h", "--help"]}


class _Command(TyperCommand):
    """A command whose ``options_metavar`` is its whole usage, hidden arguments included."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the command's name."""
        return [str(self.options_metavar)]


class _Group(TyperGroup):
    """A group that lists its commands in the order of the table, then groups: Typer would list these first."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return sorted(self.commands, key=GROUPS.__contains__)


def build(root: Callable[..., None]) -> Any:
    """Return the whole command line. ``root`` is called before each command, and without one."""
    apps = {"": _group(HELP, root, EPILOG), **{name: _group(text, print_help) for name, text in GROUPS.items()}}
    for name in GROUPS:
        apps[""].add_typer(apps[name], name=name)
    for name, declared in COMMANDS.items():
        group, _, own_name = name.rpartition(" ")
        apps[group].command(
            own_name,
            cls=_Command,
            help=declared.help,
            epilog=_verbatim(declared.epilog),
            options_metavar=f"[OPTIONS] {declared.usage}".rstrip(),
            context_settings={**SETTINGS, "allow_interspersed_args": not declared.takes_program},
        )(_callback(name, declared))
    return typer.main.get_command(apps[""])


def print_help(context: typer.Context) -> None:
    """Print the help of a group if no command is named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _group(help: str, callback: Callable[..., None], epilog: str = "") -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        callback=callback,
        help=help,
        epilog=_verbatim(epilog),
        context_settings=SETTINGS,
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def _verbatim(text: str) -> str:
    r"""Mark each paragraph with ``\b``, so that Typer keeps its lines."""
    return "\n\n".join(f"\b\n{paragraph.strip()}" for paragraph in inspect.cleandoc(text).split("\n\n"))


def _callback(name: str, declared: Command) -> Callable[..., Any]:
    """Return a function with a command's options as parameters, which imports the command and runs it."""
    hints = get_type_hints(declared.options, include_extras=True)
    parameters = [_parameter(field, hints[field.name]) for field in fields(declared.options)]
    module, function = name.split()[0], name.split()[-1]
    function = f"{function}_" if keyword.iskeyword(function) else function

    def callback(**values: Any) -> Any:
        if (db := values.get("db")) is not None:
            databases.check(db)
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        options = declared.options(**{n: v for n, v in values.items() if not (v is None or v is False or v == ())})
        return getattr(importlib.import_module(f"fp8tune.cli.{module}"), function)(options)

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return callback


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """Return a field as a parameter that Typer understands. It is None unless given; the dataclass has the default."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
    kind = list[str] if isinstance(field.default, tuple) else kind
    option = next((mark for mark in marks if isinstance(mark, Option)), None)
    if option is None:
        return _keyword(field.name, kind, typer.Argument(hidden=True, autocompletion=_completer(field.name)))
    default = option.default or (", ".join(field.default) if isinstance(field.default, tuple) else field.default)
    info = typer.Option(
        *(option.names or f"--{field.name.replace('_', '-')}").split(", "),
        help=option.help if default in (None, MISSING, "", False) else f"{option.help}  [default: {default}]",
        metavar=option.metavar or None,
        show_default=False,
        autocompletion=_completer(field.name),
        parser=_parser(option.parse) if option.parse else None,
    )
    return _keyword(field.name, kind, info)


def _keyword(name: str, kind: Any, info: Any) -> inspect.Parameter:
    default, kind = (False, kind) if kind is bool else (None, kind | None)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(value: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def _completer(field: str) -> Callable[[str], list[str]] | None:
    """Return what completes the values of a field in a shell, without torch."""
    if field not in ("kernel", "arch", "shapes"):
        return None

    def complete(incomplete: str) -> list[str]:
        from fp8tune.plan.shapes import list_sets
        from fp8tune.registry import kernels
        from fp8tune_kernels.arches import ARCHES

        names: Iterable[str] = {"kernel": kernels(), "arch": ARCHES, "shapes": list_sets()}[field]
        return [name for name in names if name.startswith(incomplete)]

    return complete
