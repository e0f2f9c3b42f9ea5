"""A recording is written and read without loss, merged by launch, and refused in one line where it is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import fp8tune
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.output.record import make_summary
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
    *((VALUE, "torch.int32"), {"num_warps": 8}, 3, 1.5, CONFIG, (CONFIG,), True, True),
    *(("parts[0]",), (Launch((), Grid((), ())),), "code", True),
)
KERNEL = Kernel(
    *("m:k", "a closure", "m.py", "0" * 16, False, ("parts", "n"), ("n",)),
    *((CONFIG,), (CONFIG,), 2.5, (LAUNCH,), {"x": 3}, {"(1,)": 0.5}, "m.py", {"(1,)": "(2,)"}, "1" * 16),
)
FULL = Recording("python x.py", "H200", "sm_90", "2.11", "3.6", 2, (KERNEL,), {"code": ({"x": "*fp32"}, "text")})
"""No field has its default."""

X, N = Tensor("x", "float32", (8, 64), (64, 1), least=-1.0, most=1.0), Scalar("n", 64)
SOFTMAX = Launch((X, N), Grid(("BLOCK",), (((64,), (8,)),)), key=(64, "torch.float32"))


def recording_of(*launches: Launch, **fields: float) -> Recording:
    return Recording(kernels=(Kernel("m:k", launches=launches, **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize("recording", [FULL, recording_of(SOFTMAX), Recording()])
@pytest.mark.parametrize("is_compact", [True, False])
def test_what_is_written_is_read_and_defaults_are_left_out(
    tmp_path: Path, recording: Recording, is_compact: bool
) -> None:
    (tmp_path / "run.json").write_text(text_of(recording, is_compact), encoding="utf-8")
    assert read(tmp_path / "run.json") == recording
    (kernel,) = json.loads(text_of(recording_of(SOFTMAX), is_compact))["kernels"]
    assert set(kernel) == {"name", "launches"}
    assert kernel["launches"][0]["arguments"][1] == {"name": "n", "value": 64}


@given(st.data())
@settings(max_examples=40)
def test_a_damaged_file_is_a_recording_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = text_of(recording_of(SOFTMAX))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    inserted = data.draw(st.sampled_from(["", "null", "-1", "{}", "[]", "true", '"x"', "1e999", "NaN"]))
    path.write_text(text[:start] + inserted + text[end:], encoding="utf-8")
    try:
        text_of(read(path))
    except UsageError as error:
        assert "\n" not in str(error)


HEAD, DEEP = '{"fp8tune_recording": 3, ', f"{'[' * 900}{']' * 900}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (None, "cannot read the recording"),
        ("[" * 100_000, "is not JSON"),
        ('{"kernels": []}', "is no recording"),
        ('{"fp8tune_recording": 4}', "newer fp8tune"),
        ('{"fp8tune_recording": 2}', "older fp8tune: record again"),
        (f'{HEAD}"kernels": {DEEP}}}', "is damaged"),
        (f'{HEAD}"kernels": [{{"name": "a", "skipped": {{"b": {DEEP}}}}}]}}', "is damaged"),
        (f'{HEAD}"kernels": [{{}}]}}', "is damaged"),
        (f'{HEAD}"kernels": [{{"name": "a", "launches": [{{"arguments": [[]], "grid": {{}}}}]}}]}}', "is damaged"),
        (f'{HEAD}"kernels": [{{"name": "a", "launches": [{{"count": {2**70}}}]}}]}}', "is damaged"),
        (f'{HEAD}"kernels": [{{"name": "a", "is_autotuned": 1}}]}}', "is damaged"),
        (f'{HEAD}"color": "red"}}', "is damaged"),
        (f'{HEAD}"kernels": [{{"name": "a", "tuning_s": NaN}}]}}', "is not JSON"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes | None, says: str
) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=says) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_equal_launches_of_two_processes_are_one() -> None:
    first = recording_of(replace(SOFTMAX, count=3, gpu_us=4.0), tuning_s=1.0)
    second = recording_of(replace(SOFTMAX, count=4, gpu_us=6.0, arguments=(replace(X, least=-2.0), N)), tuning_s=2.0)
    both = merged([first, replace(second, kernels=(*second.kernels, Kernel("m:other")))])
    assert ([kernel.name for kernel in both.kernels], both.processes) == (["m:k", "m:other"], 2)
    (launch,) = both.kernels[0].launches
    assert (launch.count, launch.gpu_us, both.kernels[0].tuning_s, launch.arguments) == (7, 5.0, 3.0, (X, N))
    other_grid = replace(SOFTMAX.grid, table=(((32,), (9,)),))
    captured = replace(SOFTMAX, in_graph=True, arguments=(replace(X, least=None), N), grid=other_grid)
    for ranks in ([captured, SOFTMAX], [SOFTMAX, captured]):  # the one with values stands for both
        (launch,) = merged([recording_of(launch) for launch in ranks]).kernels[0].launches
        assert (launch.in_graph, launch.arguments, len(launch.grid.table)) == (False, (X, N), 2)


def test_the_id_tells_layouts_apart_but_not_values() -> None:
    assert replace(SOFTMAX, arguments=(replace(X, most=9.0, is_loaded=True), N), count=8).id == SOFTMAX.id
    others = [
        *(replace(SOFTMAX, arguments=(replace(X, strides=(1, 8)), N)), replace(SOFTMAX, options={"num_warps": 8})),
        *(replace(SOFTMAX, arguments=(X, Scalar("n", 65))), replace(SOFTMAX, arguments=(replace(X, storage=1), N))),
    ]
    assert len({SOFTMAX.id, *(launch.id for launch in others)}) == 5
    assert (SOFTMAX.id, LAUNCH.id) == ("b9acf66febb1", "4f5eedc7f76b"), "rows of a database name launches by it"


def test_show_prints_a_recording_and_what_to_sweep_first(tmp_path: Path) -> None:
    """The kernel with most tuning and GPU time comes first; one with a single config only where there is no other."""
    two = (Config({"BLOCK": 64}), Config({"BLOCK": 128}))

    def kernel(name: str, gpu_us: float, configs: tuple[Config, ...] = two, tuning_s: float = 0.0) -> Kernel:
        launch = Launch((), Grid((), ()), gpu_us=gpu_us)
        return Kernel(f"a.package.of.a.long.name:{name}", launches=(launch,), configs=configs, tuning_s=tuning_s)

    fixed, slow = kernel("fixed", 60.0, configs=two[:1]), kernel("slow", 30.0, tuning_s=1.0)
    tuned, refused = kernel("tuned", 10.0, tuning_s=9.0), Kernel("m:refused", refusal="a lambda", launches=(SOFTMAX,))
    for kernels, first in (((fixed, slow, tuned, refused), tuned), ((fixed,), fixed), ((refused,), None)):
        command = make_summary(Recording(kernels=kernels), "run.json").next
        assert command == (f"fp8tune sweep --kernel {first.name} --recording run.json" if first else None)
    path = tmp_path / "run.json"
    path.write_text(text_of(Recording(kernels=(fixed, slow, tuned))))
    shown = fp8tune("show", path).stdout
    assert f"next: fp8tune sweep --kernel {tuned.name} --recording {path}" in shown
    assert f"all: fp8tune sweep --recording {path}" in shown
    output = json.loads(fp8tune("show", path, "--format", "json").stdout)
    assert [row["kernel"] for row in output["kernels"]] == [fixed.name, slow.name, tuned.name]
    assert fp8tune("show", path, "--failed").returncode == 2
