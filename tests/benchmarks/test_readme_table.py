from __future__ import annotations

from dataclasses import replace

import pytest
from database_rows import H100, H200, config, evidence, problem

from benchmarks.readme_table import BEGIN, END, ROOT, markdown, updated, winners
from fp8tune.choose import ranking


def test_the_readme_has_the_table_that_the_database_gives():
    """Where it has not: python -m benchmarks.readme_table"""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert updated(readme, markdown(winners(ROOT / "results.db"))) == readme


def best(time_us: float, K: int, device=H100, kernel: str = "colwise"):
    row = evidence(time_us, of=replace(problem(K=K), kernel=kernel), config=config(), device=device)
    return replace(row, bytes_moved=3 * 16640 * K, ceiling_gb_per_s=3000.0)


def test_a_line_says_the_spread_and_the_largest_problem_of_a_kernel():
    rows = [
        best(100.0, 1000),
        best(100.0, 5000),
        best(100.0, 4000),
        best(50.0, 1000, H200),
        best(60.0, 900, kernel="x"),
        best(60.0, 900, kernel="grouped-mm-forward"),
    ]
    _, _, *lines = markdown(ranking.winners(rows)).splitlines()
    assert lines == [
        "| NVIDIA H100 80GB HBM3 | `colwise` | 3 | 17 % | 67 % | 83 % | M=16640 K=5000 G=64 | 100.0 | 2,496 |",
        "| NVIDIA H100 80GB HBM3 | `x` | 1 | 25 % | 25 % | 25 % | M=16640 K=900 G=64 | 60.00 | 749 |",
        "| NVIDIA H200 | `colwise` | 1 | 33 % | 33 % | 33 % | M=16640 K=1000 G=64 | 50.00 | 998 |",
    ]


def test_only_what_is_between_the_markers_changes():
    readme = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    wanted = f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert updated(readme, "new") == wanted
    assert updated(wanted, "new") == wanted


@pytest.mark.parametrize("readme", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_readme_without_one_pair_of_markers_is_refused(readme):
    with pytest.raises(ValueError, match="one pair"):
        updated(readme, "new")
