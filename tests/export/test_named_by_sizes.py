"""``fp8tune export --for json`` with ``--size``, and its way back through ``fp8tune import``."""

from __future__ import annotations

import json

import pytest
import recorded_rows as recorded
from command_line import fp8tune
from recorded_rows import NAME

from fp8tune.store.results import Store


@pytest.fixture
def folder(tmp_path):
    with Store.open(str(tmp_path / "fp8tune.db"), create=True) as store:
        recorded.sweep(store)
    recorded.package(tmp_path)
    return tmp_path


def export(folder, name: str, *more: object):
    return fp8tune("export", "--for", name, "--arch", "sm_90", "--kernel", NAME, "--output", "out", *more, cwd=folder)


def test_a_dim_takes_the_name_that_the_reader_wants(folder):
    assert export(folder, "json", "--size", "M=n", "--size", "E=8").returncode == 0
    (path,) = (path for path in folder.rglob("E=8,*.json") if "evidence" not in path.name)
    sizes = {str(problem["shape"]["n"]) for problem in described(folder)}
    assert json.loads(path.read_text()).keys() == sizes


def test_what_was_exported_comes_back_to_the_problems_that_were_swept(folder):
    assert export(folder, "fla").returncode == 0
    assert fp8tune("import", "out", cwd=folder).returncode == 0
    claims = json.loads(fp8tune("show", "--published", "--format", "json", cwd=folder).stdout)
    assert [(claim["config"], claim["measured_us"]) for claim in claims] == [
        (claim["pick"], claim["pick_us"]) for claim in claims
    ]
    assert {claim["shape"]["n"] for claim in claims} == set(recorded.TIMES)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("json", ["--size", "M"], "is no size"),
        ("json", ["--size", "M=absent"], "has no dim absent"),
        ("t4", ["--size", "M=n"], "are not named by sizes"),
        ("vllm", [], "have no BLOCK_SIZE_M"),
    ],
)
def test_what_is_wrong_is_one_line(folder, name, more, message):
    done = export(folder, name, *more)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def described(folder) -> list[dict]:
    (path,) = folder.rglob("E=8,*.evidence.json")
    entries = json.loads(path.read_text())["entries"].values()
    return [problem for entry in entries for problem in entry["problems"]]
