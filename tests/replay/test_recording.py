"""A recording is written and read without loss, merged by launch, and refused in one line where it is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Recording, Scalar, Tensor, merged, read, text_of

NAMES = st.text("abcXYZ_", min_size=1, max_size=5)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
VALUES = st.recursive(
    st.one_of(
        PLAIN,
        st.sampled_from(["nan", "inf", "-inf"]).map(lambda text: {"float": text}),
        st.sampled_from(["tl.float32", "torch.float8_e4m3fn"]).map(lambda text: {"dtype": text}),
        NAMES.map(lambda name: {"function": f"module:{name}"}),
    ),
    lambda values: st.lists(values, max_size=3).map(lambda items: {"tuple": tuple(items)}),
    max_leaves=3,
)
INTS = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
FLAGS = st.none() | st.booleans()
TENSORS = st.builds(
    Tensor,
    name=NAMES,
    dtype=st.sampled_from(["bfloat16", "int32"]),
    shape=INTS,
    strides=INTS,
    alignment=st.sampled_from([1, 2, 4, 8, 16]),
    storage=st.integers(0, 3),
    offset=st.integers(0, 99),
    is_loaded=FLAGS,
    is_stored=FLAGS,
    values=st.none() | INTS,
    least=NUMBERS,
    mean=NUMBERS,
    is_sorted=st.booleans(),
    descriptor=st.none() | INTS,
)
SCALARS = st.builds(Scalar, name=NAMES, value=VALUES, is_constexpr=st.booleans())
CONFIGS = st.builds(
    Config,
    kwargs=st.dictionaries(NAMES, VALUES, max_size=2),
    num_warps=st.sampled_from([1, 4, 8]),
    maxnreg=st.none() | st.integers(1, 255),
    has_pre_hook=st.booleans(),
)
GRIDS = st.builds(
    Grid,
    axes=st.lists(NAMES, max_size=2).map(tuple),
    table=st.lists(st.tuples(st.lists(VALUES, max_size=2).map(tuple), INTS), max_size=2).map(tuple),
)
LAUNCHES = st.builds(
    Launch,
    arguments=st.lists(TENSORS | SCALARS, max_size=3).map(tuple),
    grid=GRIDS,
    key=st.lists(VALUES, max_size=2).map(tuple),
    options=st.dictionaries(NAMES, VALUES, max_size=2),
    count=st.integers(1, 9),
    gpu_us=NUMBERS,
    config=st.none() | CONFIGS,
    in_graph=st.booleans(),
)
KERNELS = st.builds(
    Kernel,
    name=NAMES,
    refusal=st.text(max_size=5),
    parameters=st.lists(NAMES, max_size=2).map(tuple),
    configs=st.lists(CONFIGS, max_size=2).map(tuple),
    tuning_s=st.floats(0, 1e6),
    launches=st.lists(LAUNCHES, max_size=2).map(tuple),
)
RECORDINGS = st.builds(
    Recording,
    command=st.text(max_size=5),
    processes=st.integers(1, 9),
    kernels=st.lists(KERNELS, max_size=2).map(tuple),
)

SOFTMAX = Launch(
    (Tensor("x", "float32", (8, 64), (64, 1), values=None, least=-1.0, most=1.0), Scalar("n", 64)),
    Grid(("BLOCK",), (((64,), (8,)),)),
    key=(64, "torch.float32"),
)


@given(RECORDINGS)
@settings(max_examples=30)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, recording: Recording) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    path.write_text(text_of(recording), encoding="utf-8")
    assert read(path) == recording


@given(st.data())
@settings(max_examples=60)
def test_a_damaged_file_is_a_recording_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = text_of(Recording(kernels=(Kernel("m:k", launches=(SOFTMAX,)),)))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    inserted = data.draw(st.sampled_from(["", "null", "-1", "{}", "[]", "true", '"x"', "1e999", "NaN"]))
    path.write_text(text[:start] + inserted + text[end:], encoding="utf-8")
    try:
        text_of(read(path))
    except UsageError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("[]", "is no recording"),
        ('{"kernels": []}', "is no recording"),
        ('{"fp8tune_recording": 4}', "newer fp8tune"),
        ('{"fp8tune_recording": 2}', "older fp8tune: record again"),
        (f'{{"fp8tune_recording": 3, "kernels": {"[" * 600}{"]" * 600}}}', "is damaged"),
        (
            f'{{"fp8tune_recording": 3, "kernels": [{{"name": "a", "skipped": {{"b": {"[" * 900}{"]" * 900}}}}}]}}',
            "is damaged",
        ),
        ('{"fp8tune_recording": 3, "kernels": [{}]}', "is damaged"),
        (
            '{"fp8tune_recording": 3, "kernels": [{"name": "a", "launches": [{"arguments": [[]], "grid": {}}]}]}',
            "damaged",
        ),
        ('{"fp8tune_recording": 3, "color": "red"}', "is damaged"),
        ('{"fp8tune_recording": 3, "kernels": [{"name": "a", "tuning_s": NaN}]}', "is not JSON"),
        ('{"fp8tune_recording": 3, "kernels": [{"name": "a", "tuning_s": 1e999}]}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (f'{{"fp8tune_recording": 3, "kernels": [{{"name": "a", "launches": [{{"count": {2**70}}}]}}]}}', "damaged"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json"):
        read(tmp_path / "absent.json")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not JSON"):
        read(tmp_path / "run.json")


def test_equal_launches_of_two_processes_are_one() -> None:
    other = replace(
        SOFTMAX, count=4, gpu_us=6.0, arguments=(replace(SOFTMAX.arguments[0], least=-2.0), SOFTMAX.arguments[1])
    )
    ranks = [
        Recording(kernels=(Kernel("m:k", tuning_s=1.0, launches=(replace(SOFTMAX, count=3, gpu_us=4.0),)),)),
        Recording(kernels=(Kernel("m:k", tuning_s=2.0, launches=(other,)), Kernel("m:other"))),
    ]
    both = merged(ranks)
    assert [kernel.name for kernel in both.kernels] == ["m:k", "m:other"]
    assert both.processes == 2
    (launch,) = both.kernels[0].launches
    assert (launch.count, launch.gpu_us) == (7, 5.0)
    assert both.kernels[0].tuning_s == 3.0
    assert launch.arguments == SOFTMAX.arguments


def test_a_launch_with_values_stands_for_one_of_a_captured_graph() -> None:
    captured = replace(
        SOFTMAX, in_graph=True, arguments=(replace(SOFTMAX.arguments[0], least=None), SOFTMAX.arguments[1])
    )
    for ranks in ([captured, SOFTMAX], [SOFTMAX, captured]):
        both = merged([Recording(kernels=(Kernel("m:k", launches=(launch,)),)) for launch in ranks])
        (launch,) = both.kernels[0].launches
        assert not launch.in_graph
        assert launch.arguments == SOFTMAX.arguments


def test_the_id_tells_layouts_apart_but_not_values() -> None:
    x, n = SOFTMAX.arguments
    assert replace(SOFTMAX, arguments=(replace(x, most=9.0, is_loaded=True), n), count=8).id == SOFTMAX.id
    assert replace(SOFTMAX, arguments=(replace(x, strides=(1, 8)), n)).id != SOFTMAX.id
    assert replace(SOFTMAX, arguments=(x, Scalar("n", 65))).id != SOFTMAX.id
    assert replace(SOFTMAX, options={"num_warps": 8}).id != SOFTMAX.id


def test_defaults_are_left_out_of_the_file() -> None:
    document = json.loads(text_of(Recording(kernels=(Kernel("m:k", launches=(SOFTMAX,)),))))
    (kernel,) = document["kernels"]
    assert set(kernel) == {"name", "launches"}
    assert kernel["launches"][0]["arguments"][1] == {"name": "n", "value": 64}
