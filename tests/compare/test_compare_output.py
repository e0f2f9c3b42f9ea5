"""Screens and pages of comparisons: hostile names, drifted controls, clipped marks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from database_rows import H100, problem

from fp8tune.comparing.verdicts import ChangeVerdict, ComparedRow, Comparison, Revision
from fp8tune.output import compare
from fp8tune.records import Problem
from fp8tune.report import comparison as page
from fp8tune.stats.estimate import Estimate

HOSTILE = '<script>alert(1)</script>"|[x](javascript:alert(1))`\u202e'
ROW = ComparedRow("colwise", ChangeVerdict.REGRESSION, problem(), H100, 100.0, 103.0, effect=Estimate(0.03, 0.001, 15))
SIDES = Revision("main", "a" * 40), Revision("branch", "b" * 40)


def html(comparison: Comparison) -> str:
    document = compare.make(comparison)
    lines = [compare.about(document), compare.control(document)]
    return page.document(document, compare.title(document), lines, [*map(compare.size_text, document.rows)])


def test_names_are_text_on_every_surface(capsys: pytest.CaptureFixture[str]) -> None:
    size = Problem(HOSTILE, problem().shape, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    row = replace(ROW, kernel=HOSTILE, problem=size, device=replace(H100, name=HOSTILE), reason=HOSTILE)
    comparison = Comparison(Revision(HOSTILE, "a" * 40), Revision(HOSTILE, "b" * 40), (row,))
    text = html(comparison)
    assert set(re.findall(r"<(\w+)", text)) <= set(re.findall(r"<(\w+)", html(Comparison(*SIDES, (ROW,)))))
    compare.screen(compare.make(comparison)).print("markdown")
    text += capsys.readouterr().out
    assert "<script" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(("added", "removed", "code"), [(0, 0, 3), (2, 0, 0), (0, 2, 0), (2, 2, 3)])
def test_a_comparison_without_rows(added: int, removed: int, code: int) -> None:
    """Sizes that only one side has are no finding, unless the other side has others instead."""
    document = compare.make(Comparison(*SIDES, (), added=added, removed=removed))
    assert document.exit_code == code
    assert compare.title(document) == "nothing to compare"
    assert html(Comparison(*SIDES, (), added=added)).count("<table") == 0
