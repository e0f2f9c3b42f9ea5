"""Commands of Typer from functions of one options dataclass, so that each option is declared once."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from fp8tune.cli import databases
from fp8tune.options import Option

Options = TypeVar("Options")

SETTINGS = {"help_option_names": ["-h", "--help"]}


class Command(TyperCommand):
    """A command whose ``options_metavar`` is its whole usage, hidden arguments included."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the command's name."""
        return [str(self.options_metavar)]


class Group(TyperGroup):
    """The program, whose help lists commands in the order of their use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        order = [
            "tune",
            "record",
            "sweep",
            "recheck",
            "show",
            "export",
            "compare",
            "report",
            "bench",
            "doctor",
            "worker",
        ]
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))


def group(help: str, epilog: str = "", **settings: Any) -> typer.Typer:
    """Return a group of commands that prints its help if no command is named."""
    return typer.Typer(
        cls=Group,
        help=help,
        epilog=verbatim(epilog),
        context_settings=SETTINGS,
        invoke_without_command=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **settings,
    )


def command(
    options: Callable[..., Options],
    usage: str = "",
    epilog: str = "",
    aliases: Mapping[str, str] = types.MappingProxyType({}),
    parent: typer.Typer | None = None,
    **settings: Any,
) -> Callable[[Callable[[Options], None]], Callable[[Options], None]]:
    """Register a function of one options dataclass as a command.

    ``usage`` names the arguments, ``aliases`` maps hidden options to the fields that they set.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [_parameter(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]
    names = {f"alias_{name.strip('-')}": field for name, field in aliases.items()}
    parameters += [_keyword(name, str, typer.Option(f"--{name[6:]}", hidden=True)) for name in names]
    if "json" in str(hints.get("format")):
        parameters.append(_keyword("as_json", bool, typer.Option("--json", hidden=True)))

    def register(function: Callable[[Options], None]) -> Callable[[Options], None]:
        def callback(**values: Any) -> None:
            if values.pop("as_json", False):
                values["format"] = "json"
            for name, field in names.items():
                value = values.pop(name)
                values[field] = values[field] if value is None else value
            if (db := values.get("db")) is not None:
                databases.check(db)
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            function(options(**{n: v for n, v in values.items() if not (v is None or v is False or v == ())}))

        callback.__doc__ = function.__doc__
        callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        name, metavar = settings.pop("name", function.__name__), f"[OPTIONS] {usage}".rstrip()
        context, end = {**SETTINGS, **settings}, verbatim(epilog)
        add = (parent or app).command
        add(name, cls=Command, context_settings=context, epilog=end, options_metavar=metavar)(callback)
        return function

    return register


def verbatim(text: str) -> str:
    r"""Mark each paragraph with ``\b``, so that Typer keeps its lines."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in inspect.cleandoc(text).split("\n\n") if paragraph)


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


app = group(
    "Tune Triton kernels: find the fastest launch configs that give the right output, keep every result, and write "
    "the best configs back to your code.",
    """
    $ fp8tune tune -- python train.py    # tune the kernels of your program
    $ fp8tune show                       # what is known, without a GPU

    Database: --db, else $FP8TUNE_DB, else ./fp8tune.db. Without --db, reading
    adds the results that come with fp8tune. FP8TUNE_TIMER=simulated:1 simulates
    a GPU.
    """,
    name="fp8tune",
)
