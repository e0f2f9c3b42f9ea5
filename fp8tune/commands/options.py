"""Declared options as parameters of a typer command, and which database a command takes that is not told."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import typer

from fp8tune.commands.completing import completer
from fp8tune.errors import UsageError
from fp8tune.options import Argument, Group, Option
from fp8tune.redaction import redacted
from fp8tune.render.terminal import notice

if TYPE_CHECKING:
    from fp8tune.store.layers import Reader

OLD_JSON = "old_json"
"""``--json``, which is ``--format json`` where a command has ``--format``; help does not name it."""


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` with a parameter for each option, as typer takes it.

    Each parameter of ``function`` is an option, ``Annotated[..., Option(...)]``, or a dataclass of options. Fields that
    declare no option keep their default.
    """
    groups = {name: hint for name, hint in get_type_hints(function).items() if dataclasses.is_dataclass(hint)}
    grouped = {name: list(_declared(group)) for name, group in groups.items()}
    parameters = [*(one for group in grouped.values() for one in group), *_declared(function)]
    defaults = {one.name: one.default for one in parameters}
    format = next((one for one in parameters if _flag(one) == "--format"), None)

    @functools.wraps(function)
    def command(**given: Any) -> None:
        _refuse_password(given.get("db"))
        if format is not None and given.pop(OLD_JSON):
            given[format.name] = type(format.default)("json")
        for name, value in given.items():
            if isinstance(defaults[name], tuple):
                given[name] = tuple(value) if value else defaults[name]
        for name, group in groups.items():
            given[name] = cast(Any, group)(**{one.name: given.pop(one.name) for one in grouped[name]})
        function(**given)

    shown = list(map(_for_typer, parameters))
    if format is not None:
        hidden = Annotated[bool, typer.Option("--json", hidden=True)]
        shown.append(inspect.Parameter(OLD_JSON, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hidden))
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return command


def _refuse_password(db: str | None) -> None:
    if db is not None and redacted(db) != db:
        raise UsageError(
            "--db holds a password, which other users of this machine can see: "
            "put it into PGPASSWORD or ~/.pgpass, or the URL into FP8TUNE_DB"
        )


def declared(function: Callable[..., None]) -> list[inspect.Parameter]:
    """What :func:`as_command` makes options and arguments of: annotated with an Option or Argument, with defaults."""
    groups = [hint for hint in get_type_hints(function).values() if dataclasses.is_dataclass(hint)]
    return [one for owner in (*groups, function) for one in _declared(owner)]


def _declared(owner: Any) -> Iterator[inspect.Parameter]:
    """The parameters of a function or dataclass that declare an option or argument."""
    hints = get_type_hints(owner, include_extras=True)
    for one in inspect.signature(owner).parameters.values():
        if any(isinstance(each, Option | Argument) for each in get_args(hints[one.name])):
            yield one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)


def _flag(one: inspect.Parameter) -> str:
    declared = get_args(one.annotation)[1]
    return declared.flag if isinstance(declared, Option) else ""


def _for_typer(one: inspect.Parameter) -> inspect.Parameter:
    type, declared, *_ = get_args(one.annotation)
    repeats = isinstance(one.default, tuple)
    completing = declared.completes and completer(declared.completes)
    info: Any
    if isinstance(declared, Argument):
        info = typer.Argument(
            help=declared.help,
            metavar=declared.metavar,
            show_default=False,
            rich_help_panel=Group.WHAT,
            autocompletion=completing,
        )
    else:
        info = typer.Option(
            *declared.flag.split(", "),
            help=_described(declared, one.default),
            show_default=False,
            metavar=None if type is bool else placeholder(declared, type),
            rich_help_panel=declared.group,
            autocompletion=completing,
            parser=declared.parse and _naming_the_option(declared.parse),
            callback=declared.check and _naming_the_option(declared.check),
        )
    # typer takes a list where an option repeats
    type, default = (list[str] | None, None) if repeats else (type, one.default)
    return one.replace(default=default, annotation=Annotated[type, info])


def _described(declared: Option, default: object) -> str:
    """An option's help, and its default."""
    if default is inspect.Parameter.empty:
        return f"{declared.help} [required]"
    shown = shown_default(declared, default)
    return f"{declared.help} [default: {shown}]" if shown else declared.help


def shown_default(declared: Option, default: object) -> str:
    """The default as people read it; empty where there is none."""
    if isinstance(default, bool):
        return ""
    number = f"{default:g}" if isinstance(default, float) else default
    own = ", ".join(default) if isinstance(default, tuple) else "" if default in (None, "") else str(number)
    return declared.shown or own


def placeholder(declared: Option, type: Any) -> str:
    """What stands for the value: ``NAME``, ``SECONDS``, ``table|json``."""
    if declared.placeholder or declared.parse:
        return declared.placeholder or getattr(declared.parse, "__name__", "value").upper()
    for one in (type, *get_args(type)):
        if inspect.isclass(one) and issubclass(one, enum.Enum):
            return "|".join(map(str, one))
    if int in (type, *get_args(type)):
        return "N"
    return declared.flag.rpartition("--")[2].upper()


def _naming_the_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose ValueError becomes an error that names the option."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # typer passes the value by name
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return checked


def database_to_write(db: str | None, say: Callable[[str], None] = notice) -> str:
    """What ``--db`` names, else the user's own database; ``say`` takes a line of which.

    Raises UsageError if git tracks it: the next pull would conflict.
    """
    from fp8tune.store import location

    return location.to_write(db, say)


@contextlib.contextmanager
def opened_to_read(db: str | None) -> Iterator[tuple[Reader, str]]:
    """The rows that ``--db`` names, else the own ones over those that come with fp8tune; and what messages call them.

    Says on stderr which they are, unless ``--db`` does.
    """
    from fp8tune.store import layers, location

    found = location.to_read(db, notice)
    with layers.opened_databases(found, notice) as reader:
        yield reader, found.label
