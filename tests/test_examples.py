"""Code of the documentation and its examples, run on a CPU at a tiny size."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_line import environment, fp8tune
from forked import program, workers_forked_from_here
from places import PLANTED, ROOT

from fp8tune.options import SweepOptions
from fp8tune.records import Status
from fp8tune.store.results import Store
from fp8tune.sweeping import planning, session

pytestmark = pytest.mark.usefixtures("quantizers_in_plain_torch")

DOCS = ROOT / "docs"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = ["--tokens", "48", "--dim", "32", "--hidden", "48", "--experts", "3", "--device", "cpu"]


def test_both_trainings_start_alike_and_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = example("moe_training").main(["--steps", "4", "--lr", "0.01", *TINY, "--plot", str(tmp_path / "plot.png")])
    bf16, fp8 = curves["bf16"], curves["fp8"]
    assert len(bf16) == len(fp8) == 4
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02)
    assert fp8[0] != bf16[0]
    assert fp8[-1] < 0.95 * fp8[0]
    assert fp8[-1] == pytest.approx(bf16[-1], rel=0.05)
    texts = capsys.readouterr().out
    assert "fp8 / bf16: " in texts
    assert ("no plot" in texts) != (tmp_path / "plot.png").exists()


def test_weights_quantized_once_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    curves = example("weights_once").main(["--steps", "3", "--lr", "0.01", *TINY])
    bf16, fp8, once = curves["bf16"], curves["fp8"], curves["fp8, weights once"]
    assert once == fp8  # to the last bit
    assert fp8 != bf16
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02)
    assert fp8[-1] == pytest.approx(bf16[-1], rel=0.05)
    assert fp8[-1] < fp8[0]
    assert capsys.readouterr().out.count(" over the last 3 steps\n") == 3


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_tasks_of_a_slurm_array_sweep_into_parts_that_are_merged(tmp_path: Path) -> None:
    """With a stand-in for ``srun``, which runs what follows its options."""
    executable(tmp_path / "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    options = ("--quick", "--kernel", f"{PLANTED / 'untouched.py'}:SPEC", "--grid", "num_warps=4")
    script = ["bash", DOCS / "examples" / "sweep_array.sbatch", *options, "--timer", "simulated:1"]
    sizes = list[int]()
    with program(tmp_path):
        for number in (0, 1):
            variables = environment() | {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_LOCALID": "0"}
            done = subprocess.run(script, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            with Store.open(str(tmp_path / "parts" / f"{number}.db"), writable=False) as store:
                sizes.append(len(store.studies()))
    parts = sorted((tmp_path / "parts").glob("*.db"))
    for _ in range(2):
        assert fp8tune("db", "import", *parts, "--db", tmp_path / "all.db").returncode == 0
        with Store.open(str(tmp_path / "all.db"), writable=False) as store:
            assert len(store.studies()) == sum(sizes) > max(sizes) > 0


def names_of(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page, and return their names."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "howto" / page).read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    return names


def stand_ins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_ins", ROOT / "tests" / "distributed" / "grouped_experts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def experts() -> Any:
    torch.manual_seed(0)
    return stand_ins().GroupedExperts(32, 48, 3).bfloat16()  # the function mode sees a cast of the weights


def step(model: Any) -> list[torch.Tensor]:
    """Return the output and the gradients of all weights, some expert without a token."""
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    out = model(x, torch.tensor([13, 0, 27]))
    return [out, *torch.autograd.grad(out.float().square().sum(), list(model.parameters()))]


def test_the_gemms_of_torchtitan_give_nearly_the_same_in_fp8_either_way() -> None:
    names = names_of("torchtitan.md")
    in_bf16 = step(experts())
    model = experts()
    names["gemms_in_torchtitan"](type(model))
    in_fp8 = step(model)
    with names["Fp8GroupedMM"]():
        from_outside = step(experts())
    for right, fp8, outside in zip(in_bf16, in_fp8, from_outside, strict=True):
        assert 0 < (fp8.float() - right.float()).norm() < 0.15 * right.float().norm()
        assert torch.equal(fp8, outside)


def test_a_model_of_transformers_is_switched_by_one_line() -> None:
    transformers = pytest.importorskip("transformers")
    names = names_of("transformers.md")
    ids = torch.randint(128, (1, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "vocab_size": 128, "num_experts": 8}
    config = transformers.OlmoeConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    model = transformers.OlmoeForCausalLM(config).bfloat16().train()
    in_bfloat16 = model(**batch).loss.item()
    loss = names["in_fp8"](model)(**batch).loss.item()
    assert loss != in_bfloat16
    assert loss == pytest.approx(in_bfloat16, abs=0.02)
    names["train"](model, torch.optim.SGD(model.parameters(), lr=0.1), [[batch]])
    assert model(**batch).loss.item() < loss


def test_the_layer_of_the_page_runs_in_torchtitan() -> None:
    names = names_of("fp8-layer.md")
    assert not names["w13"].grad.isnan().any()
    assert names["buffer"].any()
    modules = stand_ins()
    routed = modules.RoutedExperts(modules.GroupedExperts(64, 32, 4))
    ids, weights = names["ids"], names["weights"].detach()
    arguments = names["x"].detach(), weights, ids, torch.bincount(ids.flatten(), minlength=4)
    in_bf16 = routed(*arguments)
    names_of("torchtitan.md")["in_torchtitan"](modules.RoutedExperts)
    assert 0 < (routed(*arguments) - in_bf16).norm() < 0.1 * in_bf16.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is timed, by the tests of a GPU")
def test_a_softmax_is_swept_within_its_tolerance(tmp_path: Path) -> None:
    """And is wrong, with the largest error said, where the bound is narrower than bfloat16."""
    shapes, spec = tmp_path / "small.toml", tmp_path / "narrow.py"
    shapes.write_text("[[rows]]\nR = 5\nC = 37\n")
    text = (DOCS / "examples" / "softmax_spec.py").read_text()
    spec.write_text(text.replace("relative=4e-3", "relative=1e-3").replace('name="softmax"', 'name="narrow"'))
    with workers_forked_from_here(), Store.open(str(tmp_path / "rows.db"), create=True) as store:
        for file in (DOCS / "examples" / "softmax_spec.py", spec):
            options = SweepOptions(kernel=(f"{file}:SPEC",), shapes=(str(shapes),))
            list(session.run(store, planning.expanded(planning.planned(options))))
        outcomes = {(row.problem.kernel, row.outcome.status) for row in store.rows()}
        assert outcomes == {("softmax", Status.OK), ("narrow", Status.WRONG)}
        texts = {row.outcome.reason for row in store.rows() if row.outcome.reason}
    assert all("elements are out of bound, the largest error at (" in reason for reason in texts)
    assert all("is allowed (1e-03 relative + 1e-09 absolute)" in reason for reason in texts)
