"""Triton's autotuner finds what was written for it, and what others wrote is read as claims."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fp8tune.errors import UsageError
from fp8tune.export.formats import triton_cache
from fp8tune.export.given import File, Given, Tuned
from fp8tune.records import Device, NamedInts, Problem
from fp8tune.replay.recording import Argument, Config, Grid, Kernel, Launch, Scalar, Tensor

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (4, 8)]


@triton.autotune(CONFIGS, key=["n", "flag", "mode", "scale"])
@JITFunction  # whether or not this session interprets kernels
def scaled(x, out, n, flag, mode, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def _short(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
    return [config for config in configs if config.kwargs["BLOCK"] <= named["x"].shape[0] and kwargs["mode"] == "fast"]


pruned = triton.heuristics({"flag": lambda named: named["n"] % 2 == 0})(
    triton.autotune(CONFIGS, key=["n"], prune_configs_by={"early_config_prune": _short})(scaled.fn)
)
hooked = triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=print), *CONFIGS], key=["n"])(scaled.fn)
lone = triton.autotune(CONFIGS[:1], key=["n"])(scaled.fn)

H200 = Device("sm_90", "NVIDIA H200", triton=triton.__version__)
PICK, OTHER = NamedInts(BLOCK=128, num_warps=8, num_stages=3), NamedInts(BLOCK=64, num_warps=4, num_stages=3)
WIDER = NamedInts(BLOCK=256, num_warps=8, num_stages=2)  # declared nowhere
LAUNCHED = {
    named: Config({"BLOCK": named["BLOCK"]}, named["num_warps"], named["num_stages"]) for named in (PICK, OTHER, WIDER)
}
X, OUT = (Tensor(name, "bfloat16", (96,), (1,)) for name in ("x", "out"))


def tuned(
    *key: Any, pick: NamedInts = PICK, time_us: float | None = 10.0, arguments: tuple[Argument, ...] = ()
) -> Tuned:
    times = {OTHER: 12.5, WIDER: 9.0, pick: time_us or 0.0}
    if time_us is None:
        del times[pick]
    launch = Launch(arguments or (X, OUT), Grid((), ()), (*key, "torch.bfloat16", "torch.bfloat16"))
    problem = Problem("m:kernel", NamedInts(n=96))
    return Tuned(problem, NamedInts(n=96), pick, LAUNCHED[pick], time_us, times, "best of 12", launch=launch)


def of(*decided: Tuned, kernel: str = "scaled", device: Device = H200) -> Given:
    name = f"{__name__}:{kernel}"
    return Given(name, device, decided, LAUNCHED, Kernel(name))


def written(files: list[File], folder: Path) -> None:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What would be launched on an H200 without a benchmark, by Triton's autotuner with its cache on."""
    seen: list[dict[str, Any]] = []

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("benchmarked")

    monkeypatch.setattr(JITFunction, "run", lambda _, *args, **kwargs: seen.append(kwargs))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    for tuner in (scaled, pruned.fn):
        monkeypatch.setattr(tuner, "_bench", refuse)
        monkeypatch.setattr(tuner, "cache_results", True)
    scaled.cache.clear()
    pruned.fn.cache.clear()
    with knobs.cache.scope():
        yield seen


def launch(kernel: Any, folder: Path, *args: Any, **kwargs: Any) -> None:
    knobs.cache.dir = str(folder / "NVIDIA_H200")
    x = torch.zeros(96, dtype=torch.bfloat16)
    kernel[(1,)](x, x.clone(), *args, **kwargs)


KEYS = st.tuples(
    st.integers(-(2**40), 2**40), st.booleans() | st.none(), st.text(max_size=9), st.floats(allow_nan=False)
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=KEYS)
def test_triton_launches_the_pick_of_any_key_and_times_nothing(key, launches, tmp_path):
    encoded = [{"float": str(one)} if one in (float("inf"), -float("inf")) else one for one in key]
    written(triton_cache.write(of(tuned(*encoded))), tmp_path)
    launch(scaled, tmp_path, *key)
    assert (launches[-1]["BLOCK"], launches[-1]["num_warps"]) == (128, 8)
    with pytest.raises(AssertionError, match="benchmarked"):
        launch(scaled, tmp_path, key[0] + 1, *key[1:])


def test_a_list_that_the_program_sets_before_a_launch_is_in_the_key(launches, tmp_path, monkeypatch):
    listed = tuple(Config({"BLOCK": 128}, num_warps=warps) for warps in (4, 8))
    one = tuned(7, True, "", 1.0)
    assert one.launch is not None
    written(triton_cache.write(of(replace(one, launch=replace(one.launch, configs=listed)))), tmp_path)
    with pytest.raises(AssertionError, match="benchmarked"):
        launch(scaled, tmp_path, 7, True, "", 1.0)
    monkeypatch.setattr(scaled, "configs", CONFIGS[2:])
    launch(scaled, tmp_path, 7, True, "", 1.0)
    assert (launches[-1]["BLOCK"], launches[-1]["num_warps"]) == (128, 8)


def test_a_dtype_among_the_key_and_a_config_that_nobody_declared(launches, tmp_path):
    key = (7, None, "fast", {"dtype": "torch.float8_e4m3fn"})
    files = triton_cache.write(of(tuned(*key, pick=WIDER, time_us=None), tuned(8, {"dtype": "tl.float32"}, "", None)))
    written(files, tmp_path)
    launch(scaled, tmp_path, 7, None, "fast", torch.float8_e4m3fn)
    launch(scaled, tmp_path, 8, tl.float32, "", None)
    assert [(seen["BLOCK"], seen["num_stages"]) for seen in launches] == [(256, 2), (128, 3)]


def test_the_pick_has_the_least_time_though_another_was_timed_faster(tmp_path):
    cache, evidence = triton_cache.write(of(tuned(1, True, "", None)))
    assert cache.path.parts[0] == "NVIDIA_H200"
    assert cache.path.name == "scaled.autotune.json"
    timings = {(config["kwargs"]["BLOCK"], tuple(ms)) for config, ms in json.loads(cache.text)["configs_timings"]}
    assert timings == {(128, (0.01,)), (64, (0.0125,))}  # 256 took 9 us
    says = json.loads(evidence.text)
    assert (says["launches"][0]["evidence"], says["device"], says["backend"][-2:]) == (
        "best of 12",
        "NVIDIA H200",
        "90",
    )


def test_pruning_is_the_kernels_own_for_the_recorded_arguments(launches, tmp_path):
    arguments = (X, OUT, Scalar("n", 96), Scalar("mode", "fast", is_constexpr=True), Scalar("scale", None))
    written(triton_cache.write(of(tuned(96, arguments=arguments), kernel="pruned")), tmp_path)
    launch(pruned, tmp_path, 96, mode="fast", scale=None)
    assert launches[-1]["BLOCK"] == 128
    assert launches[-1]["flag"]
    said: list[str] = []
    with pytest.raises(UsageError, match=r"no launch of .*:pruned can be written"):
        triton_cache.write(of(tuned(96), kernel="pruned"), said.append)
    assert "cannot be found out here: KeyError: 'mode'" in said[0]


def test_launches_with_one_key_get_the_config_whose_largest_loss_is_least(launches, tmp_path):
    here = tuned(1, True, "", None)
    there = replace(here, config=OTHER, times_us={OTHER: 10.0, PICK: 10.5}, slowdowns={OTHER: 1.0, PICK: 1.05})
    here = replace(here, times_us={PICK: 10.0, OTHER: 14.0}, slowdowns={PICK: 1.0, OTHER: 1.4})
    cache, evidence = triton_cache.write(of(there, here))
    written([cache], tmp_path)
    launch(scaled, tmp_path, 1, True, "", None)
    assert launches[-1]["BLOCK"] == 128
    says = json.loads(evidence.text)
    assert (len(says["launches"]), says["largest_loss"]) == (2, pytest.approx(0.05))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (of(tuned(1), kernel="hooked"), "pre_hook"),
        (of(replace(tuned(1, True, "", None), launch=None)), "not recorded"),
        (of(tuned({"function": "m:f"}, True, "", None)), "no lasting text"),
        (replace(of(tuned(1)), configs={PICK: Config({"BLOCK": {"dtype": "tl.float32"}})}), "BLOCK=.*from JSON"),
        (of(tuned(1), kernel="lone"), "declares one config"),
        (of(tuned(1), kernel="CONFIGS"), "no triton.autotune any more"),
        (of(tuned(1), kernel="missing"), "cannot import .*:missing: AttributeError"),
        (of(tuned(1), device=replace(H200, triton="3.5.1")), "measured under triton 3.5.1, and"),
        (of(tuned(1), device=Device("interpreter")), "interpreter is none"),
        (replace(of(tuned(1)), recorded=None), "has no triton.autotune: export it --for python"),
    ],
)
def test_what_triton_would_not_read_is_refused_with_the_reason(refused, why):
    said: list[str] = []
    with pytest.raises(UsageError) as error:
        triton_cache.write(refused, said.append)
    lines = [*said, str(error.value)]
    assert any(re.search(why, line) for line in lines), lines
    assert not any("\n" in line for line in lines)
    assert not isinstance(driver._active, SimpleNamespace)  # the stand-in is gone


def test_a_module_in_the_current_folder_may_print_and_exit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_a_user.py").write_text("print('imported'); raise SystemExit(3)")
    with pytest.raises(UsageError, match="cannot import 'of_a_user': SystemExit: 3: export where the program runs"):
        triton_cache.write(replace(of(tuned(1)), kernel="of_a_user:kernel"))
    assert capsys.readouterr() == ("", "imported\n")


def test_what_was_written_is_read_as_it_was_given(tmp_path):
    key = (1, {"tuple": (2, True)}, {"dtype": "torch.int8"}, {"float": "nan"})
    written(triton_cache.write(of(tuned(*key), tuned(2, "", "", "", pick=WIDER, time_us=None))), tmp_path)
    known = {pick.key[0]: pick for pick in triton_cache.read(tmp_path)}
    assert known[1].kernel == f"{__name__}:scaled"
    assert known[1].key == (*key, "torch.bfloat16", "torch.bfloat16")
    assert (known[1].config, known[1].time_us) == (LAUNCHED[PICK], 10.0)
    assert (known[2].config, known[2].time_us) == (LAUNCHED[WIDER], None)


def test_what_triton_wrote_is_read(launches, tmp_path, monkeypatch):
    times = {config: [1.0 + at] * 3 for at, config in enumerate(CONFIGS)} | {CONFIGS[0]: [float("inf")] * 3}
    monkeypatch.setattr(scaled, "_bench", lambda *_, config, **__: times[config])
    launch(scaled, tmp_path, 5, False, "slow", None)
    (pick,) = triton_cache.read(tmp_path)
    assert (pick.kernel, pick.time_us) == ("scaled", 2000.0)
    assert pick.key == (5, False, "slow", None, "torch.bfloat16", "torch.bfloat16")
    assert pick.config == Config({"BLOCK": 64}, 8, 3)


CONFIG = {"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "pre_hook": None}
SOUND: dict[str, Any] = {"key": [1, "torch.int8"], "configs_timings": [[CONFIG, [0.5, 0.4, 0.6]]]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def held(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name / "k.autotune.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_damaged_files_cost_one_line_each_and_no_other_file(tmp_path):
    config = {name: value for name, value in CONFIG.items() if name != "num_warps"}
    damaged = [
        "",
        "{",
        "[]",
        b"\xff\xfe",
        "[" * 100_000,
        "{}",
        json.dumps(SOUND | {"configs_timings": []}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG, float("inf")]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG, float("nan")]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG, True]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG, []]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG, -1]]}),
        json.dumps(SOUND | {"configs_timings": [[config, 1]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG | {"num_warps": 10**99}, 1]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG | {"ir_override": "/etc/passwd"}, 1]]}),
        json.dumps(SOUND | {"configs_timings": [[CONFIG, 10**999]]}),
        json.dumps(SOUND | {"key": "1"}),
        " " * (triton_cache.LARGEST_BYTES + 1),
    ]
    for at, text in enumerate(damaged):
        held(tmp_path, f"DAMAGED{at}\x1b[2J", text)
    held(tmp_path, "SOUND", json.dumps(SOUND))
    (tmp_path / "folder.autotune.json").mkdir()
    os.mkfifo(tmp_path / "pipe.autotune.json")
    (tmp_path / "dangling.autotune.json").symlink_to("nowhere")
    said: list[str] = []
    assert [pick.time_us for pick in triton_cache.read(tmp_path, said.append)] == [500.0]
    assert len(said) == len(damaged) + 3
    assert all(line.isprintable() for line in said)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=JSON, where=st.sampled_from(["key", "configs_timings", "config", "timing", "kwargs", "evidence"]))
def test_no_document_ends_the_reading(document, where, tmp_path):
    config = document if where == "config" else CONFIG | ({"kwargs": document} if where == "kwargs" else {})
    timed = {"configs_timings": [[config, document if where == "timing" else 1.0]]}
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    path = held(folder, "FUZZED", json.dumps(SOUND | timed | ({where: document} if where in SOUND else {})))
    if where == "evidence":
        path.with_name(triton_cache.EVIDENCE).write_text(json.dumps(document))
    held(folder, "SOUND", json.dumps(SOUND))
    said: list[str] = []
    picks = triton_cache.read(folder, said.append)
    assert len(picks) + len(said) == 2
    assert picks[-1].source == "Triton cache SOUND/k.autotune.json"
    assert all(pick.kernel.isprintable() and pick.config.num_warps == 4 for pick in picks)
    assert all(line.isprintable() for line in said)


def test_a_folder_that_is_none_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="is no folder: name a TRITON_CACHE_DIR"):
        triton_cache.read(tmp_path / "nowhere")
