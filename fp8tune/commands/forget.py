"""``fp8tune forget``."""

from __future__ import annotations

from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.errors import UsageError
from fp8tune.options import Argument, JsonOrTable, TableFormat, WrittenDatabase, examples
from fp8tune.redaction import redacted
from fp8tune.render.terminal import print_json


@examples(
    ("One result that a message named", "fp8tune forget results:17"),
    ("A sweep with all of its trials", "fp8tune forget sweeps:3"),
)
def forget(
    rows: Annotated[tuple[str, ...], Argument("Rows as other commands name them, such as results:17.", "ROW...")] = (),
    db: WrittenDatabase = None,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """Remove rows from the database.

    Each goes with all rows that refer to it. Asks nothing, says what went.

    A command that meets a damaged result names it; fp8tune doctor looks for one.
    """
    from fp8tune.render import contracts
    from fp8tune.store.results import Store
    from fp8tune.sweep.picks import keep_current

    named = [_row(text) for text in rows]
    if not named:
        raise UsageError("ROW is missing: name rows as messages do, such as results:17")
    db = database_to_write(db)
    with Store.open(db) as store:
        removed = store.forget(named)
        keep_current(store)
    if format is TableFormat.JSON:
        print_json(contracts.forgotten(db, named, removed))
        return
    gone = ", ".join(f"{count:,} of {table}" for table, count in removed.items() if count)
    print(f"{redacted(db)}: {f'rows removed: {gone}' if gone else 'nothing to remove'}")


def _row(text: str) -> tuple[str, int]:
    table, _, id = text.partition(":")
    if table not in ("results", "studies", "sweeps", "processes") or not id.isdecimal():
        raise UsageError(f"row {text[:80]!r} is unknown: name results:17, studies:17, sweeps:17 or processes:17")
    return table, int(id)
