"""Models of transformers by our experts: near bfloat16, in all modes that training uses, and saved as before."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8tune_kernels.gemm.gathered_weights import quantize_after_all_gather
from fp8tune_kernels.gemm.quantized_weights import QuantizedWeights

transformers_steps = functools.partial(importlib.import_module, "benchmarks.real.transformers_steps")
experts = functools.partial(importlib.import_module, "fp8tune_kernels.transformers_experts")
"""Called by tests: transformers takes seconds to import, and every worker collects this file."""

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.usefixtures("quantizers_in_plain_torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

NAMES = ("qwen3-moe", "mixtral", "gpt-oss-20b", "olmoe")

LIMITS = {"logits_error": 0.13, "gradient_error": 0.175, "gradient_cosine": 0.985, "expert_cosine": 0.975}
"""Found are 0.044 to 0.106, 0.077 to 0.158, 0.988 to 0.997 and 0.979 to 0.996 (torch 2.13.0, x86-64), most of it at
Mixtral, whose router then sends a token elsewhere. bfloat16's own, by another order of sums: at most 0.013 and 0.017,
at least 0.9998."""

Step = tuple[float, list[Tensor]]


def small(name: str, implementation: str = "gemms") -> Any:
    """A model by ``moe_layer``, or by implementations that this registers."""
    for own, options in {"gemms": {}, "folded-gemms": {"recipe": "folded"}}.items():
        experts().register(own, experts().Options(is_layer=False, **options))
    model = transformers_steps().made(name, "cpu", small=True)
    model.set_experts_implementation(implementation)
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(128, (2, 48), generator=torch.Generator().manual_seed(seed))


def step(model: Any, call: Callable[..., Any] | None = None, ids: Tensor | None = None) -> Step:
    """Loss and gradients."""
    ids = tokens() if ids is None else ids
    model.zero_grad(set_to_none=True)
    loss = (model if call is None else call)(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(found: Step, right: Step) -> None:
    assert found[0] == right[0]
    assert all(map(torch.equal, found[1], right[1]))


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


# Near bfloat16


def is_near(found: dict[str, float]) -> bool:
    """Return True if a model's logits and gradients differ from bfloat16 by FP8's rounding only."""
    if any(found[name] < LIMITS[name] for name in ("gradient_cosine", "expert_cosine")):
        return False
    return all(found[name] < LIMITS[name] for name in ("logits_error", "gradient_error"))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_near_those_of_bfloat16(name: str) -> None:
    differences = transformers_steps().Differences(small(name), tokens())
    found = differences.measures("gemms")
    assert is_near(found), found
    exact = differences.measures("fp8tune-auto")  # on a CPU nothing was measured to be faster: bfloat16
    assert max(exact["logits_error"], exact["gradient_error"]) < 0.02  # another order of sums


@pytest.mark.parametrize(("name", "implementation"), [("olmoe", "folded-gemms"), ("gpt-oss-20b", "fp8tune")])
def test_by_the_folded_recipe_and_by_the_layer_too(name: str, implementation: str) -> None:
    model = small(name)
    found = transformers_steps().Differences(model, tokens()).measures(implementation)
    assert is_near(found), found
    right = step(model)
    with experts().weights_once(model):
        assert_same(step(model), right)
        assert_same(step(model), right)


@pytest.mark.parametrize(("name", "is_once"), [("olmoe", True), ("gpt-oss-20b", False)])
def test_a_gate_that_the_layer_lacks_is_that_of_the_module(name: str, is_once: bool) -> None:
    """Between two GEMMs, in the same bytes as without the layer."""
    model = small(name, "fp8tune")
    for module in experts_of(model):
        if name == "olmoe":
            module.act_fn = nn.GELU()
        else:
            module.limit = 6.0
    with experts().weights_once(model) if is_once else contextlib.nullcontext():
        found = step(model)
    model.set_experts_implementation("gemms")
    assert_same(found, step(model))
    model.set_experts_implementation("eager")
    assert transformers_steps().error(found[1], step(model)[1]) < LIMITS["gradient_error"]


def another_expert(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    moved = torch.where(index == 0, 1, torch.where(index == 1, 0, index))
    return experts().forward.experts_forward(module, hidden, moved, weights, options=experts().Options())


def larger_gradient(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = experts().forward.experts_forward(module, hidden, index, weights, options=experts().Options())
    return out * 1.25 - out.detach() * 0.25


def tokens_left_out(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    out = experts().forward.experts_forward(module, hidden, index, weights, options=experts().Options())
    return torch.cat([out[:-4], torch.zeros_like(out[-4:])])


def test_planted_faults_are_not_near() -> None:
    differences = transformers_steps().Differences(small("qwen3-moe"), tokens())
    functions = transformers_steps().ALL_EXPERTS_FUNCTIONS
    for fault in (another_expert, larger_gradient, tokens_left_out):
        functions.register("planted", fault)
        try:
            assert not is_near(differences.measures("planted")), fault
        finally:
            functions._global_mapping.pop("planted")


# Modes


@pytest.mark.parametrize(
    ("name", "implementation", "is_once"), [("mixtral", "gemms", False), ("gpt-oss-20b", "fp8tune", True)]
)
def test_gradient_checkpointing_changes_nothing(name: str, implementation: str, is_once: bool) -> None:
    model = small(name, implementation)
    right = step(model)
    model.gradient_checkpointing_enable()
    with experts().weights_once(model) if is_once else contextlib.nullcontext():
        assert_same(step(model), right)


def test_autocast_is_as_near() -> None:
    model = small("gpt-oss-20b", "fp8tune").float()
    with torch.autocast("cpu", torch.bfloat16):
        found = step(model)
        with experts().weights_once(model):
            assert_same(step(model), found)
        model.set_experts_implementation("eager")
        right = step(model)
    assert transformers_steps().error(found[1], right[1]) < LIMITS["gradient_error"]
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
def test_torch_compile_traces_a_model_whole() -> None:
    """Quantize weights at entry, and trace no later step again."""
    model = small("gpt-oss-20b", "fp8tune")
    del model.model.layers[1:]  # a second one is traced as the first is
    model.config.num_hidden_layers = 1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for number in range(2):
        right = step(model)
        with torch._dynamo.config.patch(error_on_recompile=number > 0), experts().weights_once(compiled):
            for _ in range(2):
                found = step(model, compiled)
                assert found[0] == right[0]
                error = transformers_steps().error(found[1], right[1])
                assert error < 0.03  # what is around the experts is decomposed otherwise
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.01)  # which torch does not count
    torch._dynamo.reset()


def trainer_for(model: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=2e-3,
        bf16=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=1,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens().repeat(3, 1)]
    return Trainer(model=model.float(), args=arguments, train_dataset=data, **options)


def test_trainer_trains_with_gradient_accumulation(tmp_path: Path, casts: list[QuantizedWeights]) -> None:
    losses = {}
    for name in ("gemms", "once"):
        trainer = trainer_for(small("qwen3-moe", "gemms"), tmp_path)
        with experts().weights_once_per_step(trainer) if name == "once" else contextlib.nullcontext():
            trainer.train()
        losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses["once"] == losses["gemms"]
    assert len(casts) == 3 * 4  # steps, and two layers of two weights
    assert losses["gemms"][-1] < losses["gemms"][0] - 0.2


def test_trainer_under_deepspeed_is_refused(tmp_path: Path) -> None:
    trainer = trainer_for(small("qwen3-moe"), tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(RuntimeError, match=r"^Trainer with DeepSpeed steps the optimizer inside backward"):
        experts().weights_once_per_step(trainer).__enter__()


@pytest.mark.parametrize(
    ("name", "implementation", "is_once"), [("olmoe", "gemms", True), ("gpt-oss-20b", "fp8tune", False)]
)
def test_no_tokens(name: str, implementation: str, is_once: bool) -> None:
    """The results of transformers' own: empty, with gradients that are zero."""
    model = small(name, implementation)
    with experts().weights_once(model) if is_once else contextlib.nullcontext():
        found = [_without_tokens(experts_of(model)[0])]
    model.set_experts_implementation("grouped_mm")
    found.append(_without_tokens(experts_of(model)[0]))
    for ours, right in zip(*found, strict=True):
        assert ours.dtype == right.dtype
        assert ours.shape == right.shape
        assert torch.equal(ours, right)


def _without_tokens(module: Any) -> list[Tensor]:
    module.zero_grad()
    hidden = torch.zeros(0, 64, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.zeros(0, 4, dtype=torch.bfloat16, requires_grad=True)
    out = module(hidden, torch.zeros(0, 4, dtype=torch.long), weights)
    out.sum().backward()
    return [out.detach(), hidden.grad, weights.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


# Which modules multiply in FP8


def test_modules_that_multiply_in_fp8_are_named() -> None:
    model = small("olmoe", "grouped_mm")
    assert experts().fp8_modules(model) == []
    names = experts().use_fp8_experts(model, "fp8tune")
    assert names == experts().fp8_modules(model) == [f"model.layers.{n}.mlp.experts" for n in range(2)]
    assert model.config._experts_implementation == "fp8tune"


def llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 48, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    return Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads, num_local_experts=4, pad_token_id=0))


def test_a_model_without_the_interface_warns() -> None:
    model = llama4()
    with pytest.warns(
        UserWarning, match="^no module of Llama4ForCausalLM has experts that 'fp8tune' multiplies"
    ) as seen:
        assert experts().use_fp8_experts(model) == []
    message = "^no module of Llama4ForCausalLM multiplies in FP8: weights_once"
    with pytest.warns(UserWarning, match=message) as entered, experts().weights_once(model):
        pass
    assert seen[0].filename == entered[0].filename == __file__


@pytest.mark.parametrize("is_layer", [False, True])
def test_experts_of_other_ranks_add_nothing(is_layer: bool) -> None:
    """An index past the last expert is what expert parallelism leaves of a token that goes elsewhere."""
    module = experts_of(small("gpt-oss-20b"))[0]
    hidden, index = torch.randn(24, 64, dtype=torch.bfloat16), torch.randint(8, (24, 4))
    weights = torch.rand(24, 4, dtype=torch.bfloat16)
    elsewhere = torch.rand(24, 4) < 0.4
    options = experts().Options(is_layer=is_layer)
    right = experts().forward.experts_forward(module, hidden, index, weights.masked_fill(elsewhere, 0), options=options)
    hidden.requires_grad_()
    weights.requires_grad_()
    found = experts().forward.experts_forward(module, hidden, index.masked_fill(elsewhere, 8), weights, options=options)
    torch.testing.assert_close(found, right, rtol=2**-7, atol=0.01)
    found.sum().backward()
    assert not hidden.grad.isnan().any()
    assert not hidden.grad[elsewhere.all(1)].any()
    assert not weights.grad[elsewhere].any()
    assert weights.grad[~elsewhere].all()


# Weights once


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedWeights]:
    """Each time that weights are quantized."""
    made = []

    def requantize(self: QuantizedWeights) -> None:
        made.append(self)
        original(self)

    original = QuantizedWeights.requantize
    monkeypatch.setattr(QuantizedWeights, "requantize", requantize)
    return made


def held_by(model: Any) -> list[Any]:
    return [value for module in experts_of(model) for name, value in vars(module).items() if "weights_once" in name]


@pytest.fixture
def layer_casts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the weights that are quantized for ``moe_layer`` outside of it."""
    made: list[Any] = []
    once = importlib.import_module("fp8tune_kernels.transformers_experts.once")
    for name in ("quantize_gate_up", "quantize_down"):
        original = getattr(once, name)
        monkeypatch.setattr(once, name, lambda w, original=original: made.append(original(w)) or made[-1])
    return made


@pytest.mark.parametrize(("name", "implementation"), [("gpt-oss-20b", "gemms"), ("qwen3-moe", "fp8tune")])
def test_weights_are_quantized_once_a_block(
    name: str, implementation: str, casts: list[QuantizedWeights], layer_casts: list[Any]
) -> None:
    results = {}
    for is_once in (False, True):
        model = small(name, implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for batch in range(2):
            with experts().weights_once(model) if is_once else contextlib.nullcontext():
                for micro in range(2):
                    ids = tokens(2 * batch + micro)[:, :16]
                    model(input_ids=ids, labels=ids).loss.backward()
                with torch.no_grad():
                    model(input_ids=ids)
            optimizer.step()
            optimizer.zero_grad()
        results[is_once] = [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, *results.values()))
    assert len(casts + layer_casts) == 2 * 4  # blocks, and two layers of two weights
    assert not held_by(model)


def in_place(model: Any) -> None:
    with torch.no_grad():
        for module in experts_of(model):
            module.down_proj.mul_(2)


def by_data(model: Any) -> None:
    for module in experts_of(model):
        module.gate_up_proj.data = module.gate_up_proj.data * 2


def by_another_parameter(model: Any) -> None:
    for module in experts_of(model):
        module.down_proj = nn.Parameter(module.down_proj.detach() * 2)


def of_one_expert(model: Any) -> None:
    experts_of(model)[-1].down_proj.data[3] *= 2


@pytest.mark.parametrize(
    ("change", "implementation"),
    [(in_place, "gemms"), (by_data, "fp8tune"), (by_another_parameter, "gemms"), (of_one_expert, "fp8tune")],
)
def test_a_change_within_a_block_raises_at_the_next_use_or_at_its_end(
    change: Callable[[Any], None], implementation: str
) -> None:
    """At its end where torch does not count it: part of a weight, through its data."""
    model = small("gpt-oss-20b", implementation)

    def block() -> None:
        with experts().weights_once(model):
            step(model)
            change(model)
            if change is not of_one_expert:
                with pytest.raises(RuntimeError, match="changed after quantization"):
                    step(model)

    with pytest.raises(RuntimeError, match=r"^model\.layers\..\.mlp\.experts\..*_proj.* changed after quantization"):
        block()
    assert not held_by(model)


@pytest.mark.usefixtures("mesh")
def test_a_model_around_the_model_may_be_given() -> None:
    model = small("olmoe")
    right = step(model)
    model = small("olmoe")
    outer = nn.parallel.DistributedDataParallel(model)
    with experts().weights_once(outer):
        assert_same(step(model, outer), right)
        assert len(held_by(model)) == 2


class Halved(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


@pytest.mark.parametrize(("name", "implementation"), [("olmoe", "gemms"), ("gpt-oss-20b", "fp8tune")])
def test_weights_that_a_parametrization_computes_are_quantized_at_each_use(name: str, implementation: str) -> None:
    model = small(name, implementation)
    for module in experts_of(model):
        nn.utils.parametrize.register_parametrization(module, "down_proj", Halved())
    right = step(model)
    with experts().weights_once(model):
        assert_same(step(model), right)
        assert_same(step(model), right)


# FSDP2


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """Mesh of this process alone; tests/distributed has those of several."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def sharded(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_of_shards(model: Any) -> Step:
    loss, grads = step(model)
    return loss, [grad.full_tensor() for grad in grads]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "implementation", "recipe"),
    [("olmoe", "gemms", "default"), ("olmoe", "fp8tune", "folded"), ("gpt-oss-20b", "fp8tune", None)],
)
def test_fsdp_gives_the_same_bits(name: str, implementation: str, recipe: str | None, mesh: Any) -> None:
    right = step(small(name, implementation))
    model = small(name, implementation)
    if recipe:
        quantize_after_all_gather(model.model.layers, recipe=recipe)
    sharded(model, mesh)
    for _ in range(2):
        assert_same(step_of_shards(model), right)


def test_weights_once_under_fsdp_is_refused(mesh: Any) -> None:
    model = sharded(small("olmoe"), mesh)
    with pytest.raises(RuntimeError, match=r"^model\.layers\.0\.mlp\.experts is managed by FSDP: use quantize_after"):
        experts().weights_once(model).__enter__()
    assert not held_by(model)


@pytest.mark.parametrize(
    ("name", "implementation", "says"),
    [
        ("gpt-oss-20b", "gemms", r"^gate_up_proj of GptOssExperts lies as \(E, K, N\): do not quantize"),
        ("olmoe", "fp8tune", r"^w13 was quantized for recipe 'default' after its all-gather"),
    ],
)
def test_gathered_weights_for_another_recipe_or_layout_are_refused(
    name: str, implementation: str, says: str, mesh: Any
) -> None:
    model = small(name, implementation)
    quantize_after_all_gather(model.model.layers)
    with pytest.raises(ValueError, match=says):
        step(sharded(model, mesh))


# Saving and loading


def assert_same_state(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(found) == list(right)
    assert all(map(torch.equal, found.values(), right.values()))


@pytest.fixture
def in_block() -> Iterator[tuple[Any, dict[str, Tensor], Step]]:
    """A model inside a block that all its weights were quantized in, its state before, and a step of it."""
    model = small("gpt-oss-20b", "fp8tune")
    before = copy.deepcopy(model.state_dict())
    right = step(model)
    with experts().weights_once(model):
        assert_same(step(model), right)
        yield model, before, right


def pickled(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_is_in_no_block(copied: Callable[[Any], Any], in_block: tuple[Any, dict[str, Tensor], Step]) -> None:
    model, before, right = in_block
    assert_same_state(model.state_dict(), before)
    other = copied(model)
    assert held_by(other) == [None, None]
    assert_same_state(other.state_dict(), before)
    assert_same(step(other), right)
    by_data(other)  # which the copy is free to do
    assert step(other)[0] != right[0]
    with experts().weights_once(other):
        step(other)
    assert_same(step(model), right)


def test_it_is_saved_and_loaded_as_pretrained(in_block: tuple[Any, dict[str, Tensor], Step], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, before, right = in_block
    name = model.config._experts_implementation
    model.save_pretrained(tmp_path)
    assert name not in (tmp_path / "config.json").read_text()
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation=name)
    assert other.config._experts_implementation == name
    assert_same_state(other.state_dict(), before)
    other.train()
    assert_same(step(other), right)
