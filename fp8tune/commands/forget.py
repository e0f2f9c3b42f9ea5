"""``fp8tune forget``."""

from __future__ import annotations

from typing import Annotated

from fp8tune.commands.options import database_to_write
from fp8tune.errors import UsageError
from fp8tune.options import Argument, JsonOrTable, Option, TableFormat, WrittenDatabase, examples
from fp8tune.redaction import redacted
from fp8tune.render.terminal import notice, print_json


@examples(
    ("One row that a message named", "fp8tune forget trials:17"),
    ("All that cannot be read", "fp8tune forget --unreadable"),
)
def forget(
    rows: Annotated[tuple[str, ...], Argument("Rows as other commands name them, such as trials:17.", "[ROW]...")] = (),
    unreadable: Annotated[bool, Option("--unreadable", "All rows that cannot be read.")] = False,
    db: WrittenDatabase = None,
    format: JsonOrTable = TableFormat.TABLE,
) -> None:
    """Remove rows from the database.

    Each goes with all rows that refer to it. Asks nothing, says what went.

    Every command names rows that it cannot read and leaves them out; fp8tune doctor lists them.
    """
    from fp8tune.render import contracts
    from fp8tune.store.results import Store
    from fp8tune.store.unreadable import parse_name
    from fp8tune.sweep.picks import keep_current

    if bool(rows) == unreadable:
        raise UsageError("say what to forget: rows such as trials:17, or --unreadable for all that cannot be read")
    named = [parse_name(text) for text in rows]
    db = database_to_write(db, create=False)
    with Store.open(db) as store:
        found = dict.fromkeys(named, "") if named else store.unreadable()
        removed = store.forget(found)
        keep_current(store)
    if format is TableFormat.JSON:
        print_json(contracts.forgotten(db, found, removed))
        return
    for (table, id), reason in found.items():
        notice(f"{table}:{id}" + (f": {reason}" if reason else ""))
    gone = ", ".join(f"{count:,} of {table}" for table, count in removed.items() if count)
    print(f"{redacted(db)}: {f'rows removed: {gone}' if gone else 'nothing to remove'}")
