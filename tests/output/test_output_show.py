"""``show``: every table of the committed results, and one database with a confirmed, a quick and a failed size."""

from __future__ import annotations

import csv
import functools
import importlib
import io
import json
import pkgutil
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import fp8tune
from database_rows import H100, H200, KERNEL, begin, config, end_finals, finished_sweep, problem, row, subject
from places import ROOT
from pydantic import ValidationError
from rich.cells import cell_len

from fp8tune import lookups, output
from fp8tune.output import documents, show
from fp8tune.records import Kind, Status
from fp8tune.revisions import source
from fp8tune.stats.study import Verdict
from fp8tune.store.results import Store
from fp8tune.sweeping import picks
from fp8tune_kernels.runtime import user_tables
from fp8tune_kernels.tables import Table

WRONG = problem(M=4096)
DEFAULT = KERNEL.default


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lookups, "table", lambda arch, triton: Table())
    yield
    user_tables.user_table.cache_clear()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a confirmed size of an H100 with a failed config, and sizes of an H200 without finals."""
    path = tmp_path_factory.mktemp("show") / "results.db"
    with Store.open(str(path), create=True) as store:
        sizes = ((16640, 5120), (65536, 5120), (131072, 1408))
        finished_sweep(store, {problem(M=M, K=K): {DEFAULT: M / 50, config(64): M / 99} for M, K in sizes}, H200)
        finished_sweep(store, {problem(): {DEFAULT: 100.0, config(64): 101.0, config(128): 130.0}}, H100)
        sweep = begin(store, H100, "finals")
        final = functools.partial(row, size=problem(), stage="final")
        trials = [
            final(time_us + 0.01 * process * round, config=finalist, process=f"final {process:02}", round=round)
            for process in range(4)
            for finalist, time_us in ((DEFAULT, 120.0), (config(64), 99.5))
            for round in range(3)
        ]
        store.add_many(sweep, trials)
        store.add(sweep, row(None, size=problem(), config=config(128, 8), status=Status.OUT_OF_RESOURCES))
        end_finals(store, sweep, problem())
        store.mark_complete(sweep, subject(problem()), 4)
        failed = begin(store, H100, "wrong")
        store.add(failed, row(None, size=WRONG, config=config(32), status=Status.WRONG))
        store.mark_complete(failed, subject(WRONG), 1)
    return path


def printed(database: Path, *arguments: str) -> str:
    done = fp8tune("show", *arguments, "--db", database)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(database: Path, *arguments: str) -> Any:
    return json.loads(printed(database, *arguments, "--format", "json"))


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_committed_results_is_wider_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with Store.open(str(ROOT / "results.db"), writable=False) as store:
        rows = list(map(show.ListedPick.from_pick, picks.read(store)))
    show.make_overview(rows, [], "results.db", ["3.6.0"]).screen("next: fp8tune show KERNEL").print()
    places = dict.fromkeys((row.kernel, row.gpu) for row in rows)
    assert len(places) > 30
    for kernel, gpu in places:
        show.make_pick_list([row for row in rows if row.kernel == kernel], [], gpu).screen().print()
        out = capsys.readouterr().out
        assert max(map(cell_len, out.splitlines())) <= width, out
        assert sum(line.endswith("verdict") for line in out.splitlines()) == 1  # one table
    changes = {"kernel": "ops:swiglu", "speedup": 0.9, "verdict": Verdict.QUICK}
    own = [row.model_copy(update=changes) for row in rows[:2]]
    assert show.make_overview([*rows, *own], [], "fp8tune.db").kernels[0].kernel == "ops:swiglu"  # recorded: first


def test_the_overview_has_a_row_for_each_kernel_and_gpu(database: Path) -> None:
    kernels = document(database)["kernels"]
    assert [(row["gpu"], row["sizes"], row["verdicts"]) for row in kernels] == [
        (H100.name, 2, {"proven": 1, "wrong": 1}),
        (H200.name, 3, {"quick": 3}),
    ]
    assert kernels[0]["speedup"] == pytest.approx(1.2, abs=0.01)
    first, heading, *_ = printed(database).splitlines()
    assert "5 picks of 1 kernel on H100 and H200" in first
    assert heading.split()[:4] == ["kernel", "gpu", "sizes", "speedup"]


@pytest.mark.parametrize(
    ("options", "sizes", "others"),
    [
        ([], [16640, 65536, 131072], {"elsewhere": {H100.name: 1}, "wrong": []}),
        (["--device", "H100"], [16640], {"gpu": H100.name, "wrong": [dict(WRONG.shape)]}),
        (["--device", "H200", "--sort", "time"], [131072, 65536, 16640], {"sizes": 3}),
        (["--device", "H200", "--sort", "time", "--top", "1"], [131072], {"sizes": 3}),
        (["--verdict", "wrong"], [], {"gpu": H100.name, "sizes": 1, "wrong": [dict(WRONG.shape)]}),
        (["--verdict", "quick"], [16640, 65536, 131072], {"gpu": H200.name, "elsewhere": {}}),
        (["K=5120", "--device", "H200"], [16640, 65536], {"sizes": 2}),
    ],
)
def test_a_kernel_is_listed_on_one_gpu_by_filters_and_order(
    options: list[str], sizes: list[int], others: dict[str, object], database: Path
) -> None:
    listed = document(database, "colwise", *options)
    assert [pick["size"]["M"] for pick in listed["picks"]] == sizes
    assert {name: listed[name] for name in others} == others
    assert documents.plain(show.PickList.model_validate(listed)) == listed
    assert printed(database, "colwise", *options).count("wrong") == len(listed["wrong"])


def test_one_size_is_shown_with_all_configs_and_the_reason(database: Path) -> None:
    size = ("colwise", "M=16640", "--device", "H100")
    first, second, *rest = document(database, *size)["candidates"]
    assert (first["config"], first["roles"]) == (dict(config(64)), ["pick"])
    assert (second["roles"], second["confirmed"]) == (["today", "default"], True)
    assert 0.19 < second["lower"] < second["slower"] < second["upper"] < 0.22
    assert [row["status"] for row in rest] == ["ok", "out_of_resources"]
    text = printed(database, *size)
    assert "1.21x over today's config (default): 120.0 -> 99.51 us" in text
    assert "proven: no rival is over 1.5 % faster; the next best is 20.6 % slower" in text
    assert "failed: 1 out of resources" in text
    lines = csv.DictReader(io.StringIO(printed(database, *size, "--format", "csv")))
    assert [row["status"] for row in lines] == [*["ok"] * 3, "out_of_resources"]
    failed = document(database, "--failed")["sizes"]
    statuses = [config["status"] for size in failed for config in size["configs"] if config["reason"]]
    assert sorted(statuses) == ["out_of_resources", "wrong"]
    assert len(printed(database, "--failed").splitlines()) == 5


def test_a_pick_is_in_use_once_an_own_table_holds_it(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was compared with the table of the moment when it was decided, so that an export changed nothing."""
    path = shutil.copy(database, tmp_path / "results.db")
    with Store.open(str(path)) as store:
        picks.keep_current(store)
    done = fp8tune("export", "--arch", "sm_90", "--kernel", "colwise", "-o", tmp_path / "sm_90.py", "--db", path)
    assert done.returncode == 0, done.stderr
    assert [pick["in_use"] for pick in document(path, "colwise", "--device", "H100")["picks"]] == [False]
    monkeypatch.setenv("FP8TUNE_TABLES", str(tmp_path))
    monkeypatch.setattr(user_tables, "_code_of", lambda name: KERNEL.source_hash)
    user_tables.user_table.cache_clear()
    (pick,) = document(path, "colwise", "--device", "H100")["picks"]
    assert (pick["in_use"], pick["today_from"], pick["speedup"]) == (True, "own table", 1.0)


def test_a_pick_is_stale_on_its_gpu_with_another_triton_driver_or_code(database: Path) -> None:
    with Store.open(str(database), writable=False) as store:
        pick = next(pick for pick in picks.read(store) if pick.device.name == H100.name)
    assert pick.version is not None
    here = source.source_hash("colwise")
    installed = replace(pick, version=replace(pick.version, source_hash=here))
    assert not picks.is_stale(installed, H100)
    assert picks.is_stale(replace(installed, version=replace(pick.version, source_hash="0" * 16)), H100)
    assert picks.is_stale(installed, replace(H100, triton="9.9"))
    assert picks.is_stale(installed, replace(H100, driver="9.9"))
    assert not picks.is_stale(installed, replace(H200, triton="9.9"))
    assert not picks.is_stale(installed, None)
    assert not picks.is_stale(replace(installed, kind=Kind.SIMULATED), replace(H100, triton="9.9"))
    assert show.ListedPick.from_pick(pick, is_stale=True).verdict is Verdict.STALE


def test_a_document_makes_itself_from_records_and_is_printable() -> None:
    record = SimpleNamespace(problem=problem(), device=replace(H100, name="a\x1bGPU"))
    place = show.Place.from_records(record)
    assert (place.kernel, place.size, place.arch) == ("colwise", dict(problem().shape), "sm_90")
    assert (place.gpu, place.attributes["routing"]) == ("a\\x1bGPU", problem().routing)
    assert show.Place.from_records(SimpleNamespace(problem=None, device=None, kernel="x"), gpu="y").size == {}
    record = SimpleNamespace(status="ok", time_us=float("inf"), slowdown=1.0, reason=None, config=None)
    values = {"slower": 0.0, "lower": None, "upper": None, "confirmed": True, "roles": []}
    times = show.Candidate.from_records(record, **values)
    assert (times.time_us, times.reason) == (None, "")
    del record.status
    with pytest.raises(ValidationError, match="status"):
        show.Candidate.from_records(record, **values)


def test_every_field_of_every_document_has_a_sentence_and_a_known_unit() -> None:
    for module in pkgutil.iter_modules(output.__path__):
        importlib.import_module(f"fp8tune.output.{module.name}")
    models = [documents.Document]
    for model in models:
        models += model.__subclasses__()
        for name, field in model.model_fields.items():
            extra = field.json_schema_extra
            assert isinstance(extra, dict), (model, name)
            assert extra["unit"] in {"", "us", "s", "share", "x", "GB/s", "GB", "bytes"}, (model, name)
            assert str(field.description).endswith("."), (model, name)
    assert len(models) > 20
