"""Tables of docs/howto/transformers.md, of docs/results/transformers.json.

    python -m benchmarks.real.transformers_table each-use    # weights quantized at each use, and bfloat16
    python -m benchmarks.real.transformers_table once        # once for all micro-batches of a step
    python -m benchmarks.real.transformers_table peak        # memory past parameters and gradients

The file is what ``benchmarks/real/transformers_steps.py --json`` writes on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "transformers.json"

NAMES = {"qwen3-moe": "Qwen3-30B-A3B", "mixtral": "Mixtral 8x7B", "gpt-oss-20b": "gpt-oss 20B", "olmoe": "OLMoE"}

MILLISECONDS, GIB = "median_ms", "peak_gib"

TABLES = {
    "each-use": (MILLISECONDS, ("grouped_mm", "permuted", "gemms", "fp8tune")),
    "once": (MILLISECONDS, ("gemms-once", "fp8tune-once")),
    "peak": (GIB, ("grouped_mm", "gemms", "fp8tune", "fp8tune-once")),
}
"""Name -> what is shown, and of which implementations."""


def table(rows: Sequence[Mapping[str, Any]], figure: str, implementations: Sequence[str]) -> str:
    """Return a figure of a micro-batch as Markdown, a line for each model and number of tokens."""
    times = {(row["model"], row["tokens"], row["implementation"]): row.get(figure) for row in rows}
    heads = [f"`{name}`" for name in implementations]
    lines = [
        f"| model | tokens | {' | '.join(heads)} |",
        f"|---|---:|{'---:|' * len(implementations)}",
    ]
    for model, name in NAMES.items():
        for tokens in sorted({row["tokens"] for row in rows if row["model"] == model}):
            found = [times.get((model, tokens, implementation)) for implementation in implementations]
            cells = ["" if each is None else f"{each:.1f}" for each in found]
            lines.append(f"| {name} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Prints the tables of these names."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    print(*(table(rows, *TABLES[name]) for name in arguments), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
