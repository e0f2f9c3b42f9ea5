"""T4 results and metadata: every trial, by the schema where kernel_tuner brings it, and by what it asks."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import format_picks as picks
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.export.formats import t4
from fp8tune.records import NamedInts, Status
from fp8tune.replay.configs import encoded

INVALIDITIES = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


def sweep():
    """One problem where a config is right and one ended in every other way."""
    failures = {
        encoded(picks.GEMM, picks.LARGE): ("wrong", "84 % of the bytes differ"),
        encoded(picks.GEMM, picks.EVEN): ("out_of_resources", "shared memory"),
    }
    return picks.given(picks.tuned(NamedInts(M=16, N=64, K=32), picks.SMALL, {0: 12.5}, failures=failures))


def schema(name: str):
    """A schema as kernel_tuner brings it: it is not copied here."""
    try:
        files = importlib.metadata.files("kernel_tuner") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kernel_tuner is not installed: pip install kernel_tuner")
    (file,) = (file for file in files if file.match(f"schema/T4/*/{name}-schema.json"))
    return json.loads(Path(str(file.locate())).read_text())


@pytest.mark.parametrize("made", [sweep(), picks.gemm()])
def test_the_files_fit_the_schemas(made):
    schemas = {name: schema(name) for name in ("results", "metadata")}
    jsonschema = pytest.importorskip("jsonschema")
    for path, document in picks.documents(t4.write(made)).items():
        jsonschema.validate(document, schemas["metadata" if "metadata" in path else "results"])


def test_each_trial_is_a_result():
    documents = picks.documents(t4.write(sweep()))
    results = documents["_matmul/0-M=16,N=64,K=32.t4-results.json"]["results"]
    assert [(one["invalidity"], one["correctness"], one["times"]["runtimes"]) for one in results] == [
        ("correct", 1, [0.0125]),
        ("correctness", 0, []),
        ("runtime", 0, []),
    ]
    assert results[0]["configuration"] == dict(picks.SMALL.kwargs) | {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
    assert results[1]["measurements"] == [{"name": "reason", "value": "84 % of the bytes differ", "unit": ""}]


def test_results_have_what_t4_requires():
    for path, document in picks.documents(t4.write(sweep())).items():
        assert document["schema_version"] == "1.0.0"
        if "metadata" in path:
            assert isinstance(document["metadata"]["hardware"]["hardware_description"], list)
            assert document["metadata"]["environment"]["requirements"] == ["torch==2.13.0", "triton==3.6.0"]
            continue
        for result in document["results"]:
            assert result.keys() >= {"configuration", "times", "invalidity", "correctness"}
            assert result["invalidity"] in INVALIDITIES
            assert all(isinstance(time, float) for time in result["times"]["runtimes"])


def test_every_status_has_a_name():
    assert set(t4.INVALIDITY) == set(Status)
    assert set(t4.INVALIDITY.values()) == INVALIDITIES


def test_the_metadata_has_the_evidence():
    document = picks.documents(t4.write(sweep()))["_matmul/t4-metadata.json"]
    assert document["fp8tune"]["problems"]["0-M=16,N=64,K=32.t4-results.json"]["evidence"] == "winner on M=16 N=64 K=32"


@given(
    st.lists(st.dictionaries(st.text(max_size=30), st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=12)
)
def test_files_are_as_many_as_problems_and_stay_in_the_folder(shapes):
    made = picks.given(*(picks.tuned(NamedInts(shape), picks.SMALL, {0: 1.0}) for shape in shapes))
    paths = [file.path for file in t4.write(made)]
    assert len(set(paths)) == len(shapes) + 1
    assert all(path.parts[0] == "_matmul" and len(path.parts) == 2 and len(path.name) <= 255 for path in paths)


def test_the_same_picks_give_the_same_text():
    assert t4.write(sweep()) == t4.write(sweep())
