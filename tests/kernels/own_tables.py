"""The text of a user's own table."""

from fp8tune_kernels.tables import Row


def table_of(*rows: Row, nearest: tuple[str, ...] = ()) -> str:
    placed = tuple((*row, 0) for row in rows)
    return f"NEAREST: tuple = {nearest!r}\nORIGINS: tuple = ((),)\nROWS: tuple[object, ...] = {placed!r}\n"
