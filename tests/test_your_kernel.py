"""Lists in the pages on one's own kernel are complete, and their examples can be swept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from forked import workers_forked_from_here
from places import ROOT

from fp8tune.options import SweepOptions
from fp8tune.records import Status
from fp8tune.revisions.reference import KernelReference
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session
from fp8tune.tables import formats

EXAMPLES = ROOT / "docs" / "examples"
HOWTO = ROOT / "docs" / "howto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is timed, by the tests of a GPU")
@pytest.mark.parametrize(
    ("file", "name", "grid"),
    [("add_spec.py", "residual-add", ("BLOCK=512",)), ("pieces_spec.py", "add-in-pieces", ("PIECES=1,8",))],
)
def test_the_spec_by_hand_is_swept(file: str, name: str, grid: tuple[str, ...], tmp_path: Path) -> None:
    kernel, shapes = f"{EXAMPLES / file}:SPEC", str(EXAMPLES / "add.toml")
    options = SweepOptions(kernel=(kernel,), shapes=(shapes,), grid=grid)
    with workers_forked_from_here(), Store.open(str(tmp_path / "rows.db"), create=True) as store:
        list(session.run(store, planning.expanded(planning.planned(options))))
        rows = list(store.rows())
    assert {(row.problem.kernel, *row.problem.shape, row.outcome.status) for row in rows} == {
        (name, "tokens", "hidden", Status.OK)
    }


def rows(page: str, header: str) -> list[str]:
    """The first column of a page's table."""
    text = (HOWTO / page).read_text(encoding="utf-8")
    table = text[text.index(f"| {header} |") :].partition("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def test_the_page_lists_every_format() -> None:
    assert {row.strip("`") for row in rows("export.md", "`--for`")} == {"(none)", *formats.names()}
    rules = [row.strip("`") for row in rows("record.md", "`--tolerance`")]
    assert rules == ["exact", "exact-sums", "RTOL,ATOL"]


def test_the_kernel_references_of_the_page_are_read() -> None:
    texts = re.findall(r"`([^`]+)`", " ".join(rows("record.md", "text")))
    assert len(texts) == 9
    for text in texts:
        assert str(KernelReference.parse(text)) == text.replace("1e-3", "0.001").replace("1e-6", "1e-06")


def test_the_recording_is_of_the_kernel_as_it_is() -> None:
    """Check the recording that a reader of the tutorial may take instead of making one."""
    recorded = json.loads((EXAMPLES / "swiglu.json").read_text(encoding="utf-8"))
    (kernel,) = recorded["kernels"]
    text = (EXAMPLES / "swiglu.py").read_text(encoding="utf-8")
    assert (kernel["name"], kernel["file"], len(kernel["configs"])) == ("swiglu:kernel", "swiglu.py", 20)
    assert f"def kernel({', '.join(kernel['parameters'])}".replace("BLOCK", "BLOCK: tl.constexpr") in text
