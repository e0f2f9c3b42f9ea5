"""Launch tables, one generated module an arch, written by ``fp8tune export`` and read by :mod:`fp8tune_kernels.lookup`.

Each holds ``ROWS``, tuples of: kernel; device name, or ``""`` for any device of the arch; the lookup key's items
sorted by name, or None for any shape; the config's items. An axis that a row leaves out has the kernel's declared
default.
"""

from __future__ import annotations

Row = tuple[str, str, tuple[tuple[str, int], ...] | None, tuple[tuple[str, int], ...]]
"""kernel, device name, key items, config items."""
