from __future__ import annotations

import json

from benchmarks.bench_table import main


def row(kernel: str, time_us: float | None, ratio: float | None, reason: str = "", layout: str = "contiguous"):
    return {
        "row": "problem",
        "kernel": kernel,
        "shape": {"M": 1000, "K": 1000},
        "input_layout": layout,
        "bytes_moved": 3_000_000,
        "time_us": time_us,
        "reason": "" if time_us else "OutOfMemoryError: planted",
        "gb_per_s": 3000 / time_us if time_us else None,
        "ceiling_share": 0.75 if time_us else None,
        "rivals": {"torchao": {"time_us": 6.0, "ratio": ratio, "reason": reason}},
    }


def test_a_wrong_rival_is_named_and_is_in_no_mean(tmp_path, capsys):
    wrong = "wrong: 84 % of codes, 31 % of scales"
    first = [row("colwise", 2.0, None, wrong), row("colwise", 2.0, 3.0), {"row": "kernel", "kernel": "colwise"}]
    second = [row("rowwise", 1.0, 12.0, layout="transposed"), row("rowwise", None, None)]
    for name, objects in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps(objects), encoding="utf-8")
    main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    said = capsys.readouterr().out.splitlines()
    assert said[2:6] == [
        f"| `colwise` | M=1000 K=1000 | 3 | 2.00 | 1,500 | 75 % | 6.00 | {wrong} |",
        "| `colwise` | M=1000 K=1000 | 3 | 2.00 | 1,500 | 75 % | 6.00 | 3.00x |",
        "| `rowwise` | M=1000 K=1000 view | 3 | 1.00 | 3,000 | 75 % | 6.00 | 12.00x |",
        "| `rowwise` | M=1000 K=1000 | 3 | OutOfMemoryError: planted |  |  | 6.00 |  |",
    ]
    assert said[-2] == "Geometric means: `colwise` 3.00, `rowwise` 12.00; of all 2 6.00, 3.00 to 12.00."
    assert said[-1] == "torchao is wrong on 1 of 4 and in no mean there."
