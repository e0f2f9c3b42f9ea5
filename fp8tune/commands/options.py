"""Declared options as parameters of a typer command, and which database a command takes that is not told."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from fp8tune.errors import UsageError
from fp8tune.options import COMMITTED_DATABASE, DATABASE, Argument, Option


@dataclass(frozen=True)
class _Parameter:
    """One option or argument of a command."""

    name: str
    type: Any
    declared: Option | Argument
    default: Any

    @property
    def repeats(self) -> bool:
        return bool(self.type == tuple[str, ...])

    def for_typer(self) -> inspect.Parameter:
        """The parameter that typer reads."""
        type, default = (list[str] | None, None) if self.repeats else (self.type, self.default)
        declared = self.declared
        info: Any
        if isinstance(declared, Argument):
            info = typer.Argument(help=declared.help, metavar=declared.metavar)
        else:
            info = typer.Option(
                declared.flag,
                help=declared.help,
                show_default=declared.shown or (", ".join(self.default) or False if self.repeats else True),
                parser=declared.parse and _naming_the_option(declared.parse),
                callback=declared.check and _naming_the_option(declared.check),
            )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=Annotated[type, info])

    def value(self, given: Any) -> Any:
        """Of what typer gives."""
        return given if not self.repeats else tuple(given) if given else self.default


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` with a parameter for each option, as typer takes it.

    Each parameter of ``function`` is an option, ``Annotated[..., Option(...)]``, or a dataclass of options. Fields that
    declare no option keep their default.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[Any, list[_Parameter]]] = {}
    alone: list[_Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if dataclasses.is_dataclass(hint):
            groups[parameter.name] = hint, list(_fields(hint))
        else:
            alone.append(_parameter(parameter.name, hint, parameter.default))

    @functools.wraps(function)
    def command(**given: Any) -> None:
        values = {one.name: one.value(given[one.name]) for one in alone}
        for name, (group, fields) in groups.items():
            values[name] = group(**{one.name: one.value(given[one.name]) for one in fields})
        function(**values)

    parameters = [*(one for _, fields in groups.values() for one in fields), *alone]
    command.__signature__ = inspect.Signature([one.for_typer() for one in parameters])  # type: ignore[attr-defined]
    return command


def _fields(options: Any) -> Iterator[_Parameter]:
    hints: Mapping[str, Any] = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        if any(isinstance(each, Option | Argument) for each in get_args(hints[field.name])):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            yield _parameter(field.name, hints[field.name], default)


def _parameter(name: str, hint: Any, default: Any) -> _Parameter:
    type, declared, *_ = get_args(hint)
    return _Parameter(name, type, declared, default)


def _naming_the_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose ValueError becomes an error that names the option."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # typer passes the value by name
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return checked


def database_to_write(db: str | None) -> str:
    """What ``--db`` names, else the default one. Raises UsageError if git tracks that: the next pull would conflict."""
    if db is not None:
        return db
    from fp8tune.render import terminal as render
    from fp8tune.revisions import git

    if git.tracks(Path(DATABASE)):
        raise UsageError(f"git tracks {DATABASE}: write into it with --db {DATABASE}, or into another with --db PATH")
    if Path(COMMITTED_DATABASE).exists() and not Path(DATABASE).exists():
        render.notice(f"rows go into {DATABASE}; {COMMITTED_DATABASE} stays as it is unless --db names it")
    return DATABASE


def database_to_read(db: str | None) -> str:
    """What ``--db`` names, else the default one if it is there, else the committed one; says which where both are."""
    own, committed = Path(DATABASE).exists(), Path(COMMITTED_DATABASE).exists()
    if db is None and own and committed:
        from fp8tune.render import terminal as render

        render.notice(f"rows are those of {DATABASE}; --db {COMMITTED_DATABASE} reads the committed ones")
    return db if db is not None else COMMITTED_DATABASE if committed and not own else DATABASE
