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

VALUE = {"tuple": (1, None, True, "text", 0.5, {"float": "nan"}, {"dtype": "tl.float32"}, {"function": "m:f"})}
TENSOR = Tensor(
    *("parts[0]", "int32", (2, 3), (3, 1), 8, 1, 7, True, False, (1, 2, 3), "packed", -1.0, 2.0, 0.5, 0.1, 0.25, 0.75),
    *(VALUE, True, (16, 16)),
)
CONFIG = Config({"BLOCK": 64, "MODE": VALUE}, 8, 2, 2, 128, True)
LAUNCH = Launch(
    (TENSOR, Scalar("n", VALUE, True)),
    Grid(("BLOCK", "MODE"), (((64, VALUE), (8, 1)), ((128, None), ()))),
    *(
        (VALUE, "torch.int32"),
        {"num_warps": 8},
        3,
        1.5,
        CONFIG,
        (CONFIG,),
        True,
        True,
        ("parts[0]",),
        (Launch((), Grid((), ())),),
        "code",
    ),
)
KERNEL = Kernel(
    *(
        "m:k",
        "a closure",
        "m.py",
        "0" * 16,
        False,
        ("parts", "n"),
        ("n",),
        (CONFIG,),
        (CONFIG,),
        2.5,
        (LAUNCH,),
        {"x": 3},
    )
)
RECORDING = Recording("python x.py", "H200", "sm_90", "2.11", "3.6", 2, (KERNEL,), {"code": ({"x": "*fp32"}, "text")})
"""No field has its default."""

SOFTMAX = Launch(
    (Tensor("x", "float32", (8, 64), (64, 1), values=None, least=-1.0, most=1.0), Scalar("n", 64)),
    Grid(("BLOCK",), (((64,), (8,)),)),
    key=(64, "torch.float32"),
)


@pytest.mark.parametrize(
    "recording", [RECORDING, Recording(kernels=(Kernel("m:k", launches=(SOFTMAX,)),)), Recording()]
)
@pytest.mark.parametrize("is_compact", [True, False])
def test_what_is_written_is_read(tmp_path: Path, recording: Recording, is_compact: bool) -> None:
    (tmp_path / "run.json").write_text(text_of(recording, is_compact), encoding="utf-8")
    assert read(tmp_path / "run.json") == recording


@given(st.data())
@settings(max_examples=40)
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


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("absent.json", "absent"), ("run.json", "is not JSON")):
        with pytest.raises(UsageError, match=reason):
            read(tmp_path / name)


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
