"""Every object of the JSON that commands print, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8tune.render.documents import DOCUMENTS
from fp8tune.render.fields import Document, Fields
from fp8tune_reference.commands import functions, name
from fp8tune_reference.markdown import code, needed, prose, sections, sentence, table


def part(documents: Mapping[str, Document] = DOCUMENTS) -> str:
    """A section an object, those of one command together. Raises UndocumentedError for a field without a meaning."""
    order = {name(one): place for place, one in enumerate(functions())}
    placed = sorted(documents.values(), key=lambda one: order.get(one.commands.split()[0].strip(","), len(order)))
    return sections(*map(section, placed))


def section(document: Document) -> str:
    """One object."""
    command, _, which = document.commands.partition(", ")
    commands = ", ".join(code(f"fp8tune {each}") for each in document.commands.split(", ") if _is_command(each))
    heading = commands if not which or _is_command(which) else f"{code(f'fp8tune {command}')}, {which}"
    rows = list(_rows(document.fields, ""))
    return sections(f"## {heading}", sentence(document.meaning), table(["field", "type", "unit", "meaning"], rows))


def _is_command(text: str) -> bool:
    return text.split()[0] in map(name, functions())


def _rows(fields: Fields, path: str) -> Iterator[tuple[str, ...]]:
    for one in fields:
        full = path + one.name
        yield code(full), one.type, one.unit, prose(needed(one.meaning, f"JSON field {full}"))
        if one.of:
            inner = "[]." if one.type.startswith("list") else ".*." if one.keyed else "."
            yield from _rows(one.of, full + inner)
