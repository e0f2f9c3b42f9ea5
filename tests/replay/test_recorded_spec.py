"""The spec of a recorded kernel: its problems, its grid, its tensors, and what one launch does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_recording
from hypothesis import given
from hypothesis import strategies as st
from toy_recording import FOLDER, by_blocks, floats, written

from fp8tune.errors import UsageError
from fp8tune.measure.comparing import Rule
from fp8tune.plan import grids
from fp8tune.records import NamedInts
from fp8tune.replay import configs, sizes
from fp8tune.replay.case import Case
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Scalar, Tensor
from fp8tune.replay.spec import RecordedSpec, build, repeatable
from fp8tune.replay.values import decoded


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(FOLDER))


def spec_of(kernel: Kernel, **options: Any) -> RecordedSpec:
    import toy_kernels

    return build(kernel, getattr(toy_kernels, kernel.name.partition(":")[2]), **options)


def only(spec: RecordedSpec) -> Any:
    (problem,) = spec.recorded
    return problem


def test_problems_have_the_key_first_and_no_strides() -> None:
    spec = spec_of(toy_recording.softmax(64, 96))
    assert list(only(spec).shape.items()) == [("n_cols", 96), ("n_rows", 64)]
    assert spec.lookup_key(only(spec)) == NamedInts(n_cols=96)
    assert only(spec).input_layout.startswith("recorded-")
    assert (only(spec).fp8_dtype, only(spec).scale_mode, only(spec).routing) == ("", "", "none")
    assert spec.bytes_moved(only(spec).shape) == 2 * 64 * 96 * 4


def test_dtypes_are_in_the_key_where_launches_differ_in_them() -> None:
    spec = spec_of(toy_recording.keyed())
    first, second = spec.recorded
    assert spec.key == ("n", "FLAG", "MODE", "x_dtype", "y_dtype")
    assert first.shape["FLAG"] == 1
    assert first.shape["MODE"] == second.shape["MODE"] > 0
    assert spec.bytes_moved(first.shape) == 2 * spec.bytes_moved(second.shape)


def test_the_grid_is_the_declared_configs_and_each_widened() -> None:
    spec = spec_of(toy_recording.softmax())
    axes = grids.parse_grid(["ROWS=4", "num_warps=4,8"], spec.axes)
    result = grids.configs(spec, only(spec), axes, None)
    assert next(iter(result)) == spec.default == NamedInts(ROWS=1, num_warps=4, num_stages=3)
    assert [dict(config) for config in result][2:] == [
        {"ROWS": 4, "num_warps": 4, "num_stages": 3},
        {"ROWS": 4, "num_warps": 8, "num_stages": 3},
    ]
    declared = grids.configs(spec, only(spec), spec.axes, None)
    assert [config["ROWS"] for config in declared] == [1, 2]


def test_a_config_whose_grid_was_not_recorded_is_pruned() -> None:
    spec = spec_of(toy_recording.softmax())
    result = grids.configs(spec, only(spec), grids.parse_grid(["ROWS=3"], spec.axes), None)
    assert "the recording has no grid for" in result[NamedInts(ROWS=3, num_warps=4, num_stages=3)]


def test_a_config_that_disagrees_with_itself_is_no_reference() -> None:
    class Drawing:
        """A kernel that gives something else each time."""

        configs, arg_names, reset_to_zero, restore_value = (), ("x", "y", "n"), (), ()
        early_config_prune = None

        class fn:  # noqa: N801 - an attribute of Triton's
            @staticmethod
            def run(y: Any, **given: Any) -> None:
                y.copy_(torch.rand(y.shape))

        def run(self) -> None:
            pass

    spec = build(toy_recording.copies("hooked", 32), Drawing())
    inputs = replace(spec).inputs(only(spec), "cpu")
    spec = build(replace(toy_recording.copies("wrong_block", 32)), Drawing())
    with pytest.raises(ValueError, match="is not deterministic: launched twice, 32 of 32 elements of y differ"):
        spec.reference(*inputs)


def test_elements_that_the_first_config_leaves_are_nobodys() -> None:
    """A kernel may fill a part of its output: what it leaves is no fault of any config."""
    kernel = toy_recording.copies("drops_tail", 192)
    larger = replace(kernel.launches[0].arguments[1], shape=(200,), strides=(1,))
    launch = replace(kernel.launches[0], arguments=(kernel.launches[0].arguments[0], larger, Scalar("n", 192)))
    spec = spec_of(replace(kernel, launches=(launch,)))
    inputs = spec.inputs(only(spec), "cpu")
    expected = spec.reference(*inputs)
    output = torch.full((200,), 5.0)
    assert spec.prepare is not None
    spec.prepare(inputs, (output,))
    assert output[192:].tolist() == expected[0][192:].tolist() == [0.0] * 8
    assert output[:192].tolist() == [5.0] * 192


# Tensors


def made(*arguments: Tensor, zeroed: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    case = Case((Launch(arguments, Grid((), (((), (1,)),))),), "cpu", zeroed, frozenset())
    inputs, outputs = case.inputs(0), case.outputs()
    case.prepare(inputs, outputs)
    return case.arguments(inputs, outputs)[0]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int64", "int8", "bool"]),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_a_tensor_has_the_recorded_form(shape: list[int], gap: int, dtype: str, alignment: int) -> None:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size + gap
    tensor = made(floats("x", dtype=dtype, shape=tuple(shape), strides=tuple(strides), alignment=alignment))["x"]
    assert (tensor.shape, tensor.stride()) == (tuple(shape), tuple(strides))
    assert str(tensor.dtype) == f"torch.{dtype}"
    first = tensor.storage_offset() * tensor.element_size()
    assert first % 16 == (0 if alignment == 16 or tensor.element_size() > alignment else alignment)


def test_floats_have_the_recorded_distribution() -> None:
    tensor = made(floats("x", 100, 1000, mean=2.0, deviation=0.5, least=1.0, most=4.0, zeros=0.25))["x"]
    nonzero = tensor[tensor != 0]
    assert (tensor == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert nonzero.mean().item() == pytest.approx(2.0, abs=0.05)
    assert 1.0 <= nonzero.min().item() <= nonzero.max().item() <= 4.0
    assert made(floats("x", 5, least=0.5, most=0.5))["x"].tolist() == [0.5] * 5
    constant = {"float": "inf"}  # what a minimum begins with
    assert made(floats("x", 5, not_finite=1.0, constant=constant))["x"].tolist() == [math.inf] * 5


def test_sorted_ranges_end_at_their_bounds() -> None:
    tensor = made(floats("x", 50, dtype="int64", least=3.0, most=90.0, is_sorted=True))["x"]
    assert tensor.tolist() == sorted(tensor.tolist())
    assert (tensor[0], tensor[-1]) == (3, 90)


def test_constants_of_exact_inputs_are_powers_of_two() -> None:
    kernel = toy_recording.copies("hooked", 32)
    scale = floats("x", 32, least=0.7, most=0.7)
    launch = replace(kernel.launches[0], arguments=(scale, *kernel.launches[0].arguments[1:]))
    spec = spec_of(replace(kernel, launches=(launch,)), check="exact-inputs")
    assert spec.inputs(only(spec), "cpu")[0].view(torch.float32).tolist() == [0.5] * 32


def test_expanded_arguments_are_one_element() -> None:
    assert made(floats("x", 4, strides=(0,)))["x"].unique().numel() == 1


def test_arguments_that_share_memory_still_do() -> None:
    left = floats("left", shape=(4, 2), strides=(4, 1))
    right = written("right", shape=(4, 2), strides=(4, 1), offset=2)
    tensors = made(left, right)
    assert tensors["left"].untyped_storage().data_ptr() == tensors["right"].untyped_storage().data_ptr()
    assert tensors["right"].data_ptr() - tensors["left"].data_ptr() == 2 * 4


def test_arguments_of_other_dtypes_may_share_memory() -> None:
    tensors = made(floats("x", 4), written("codes", 16, dtype="int8"))
    assert tensors["codes"].numel() == 16
    assert tensors["x"].data_ptr() == tensors["codes"].data_ptr()


# Odd sizes


def test_sizes_that_16_divides_still_are_and_strides_follow() -> None:
    launch = toy_recording.softmax(64, 96).launches[0]
    result = sizes.odd(launch)
    assert isinstance(result, Launch)
    x, _, n_rows, n_cols, stride = result.arguments
    assert isinstance(x, Tensor)
    assert [item.value for item in (n_rows, n_cols, stride)] == [*x.shape, x.shape[1]]  # type: ignore[union-attr]
    assert all(size % 32 == 16 for size in x.shape)
    assert result.grid.of({"ROWS": 2}) == (-(-x.shape[0] // 2),)


def test_other_sizes_become_primes() -> None:
    launch = toy_recording.copies("hooked", 1000 + 1).launches[0]
    result = sizes.odd(launch)
    assert isinstance(result, Launch)
    assert result.arguments[2] == Scalar("n", 157)


def test_group_ends_are_scaled_with_the_rows() -> None:
    ends = floats("ends", 3, dtype="int32", values=(100, 100, 1024), storage=2)
    arguments = (floats("x", 1024), ends, Scalar("n", 1024))
    result = sizes.odd(Launch(arguments, toy_recording.by_blocks(1024, (64,))))
    assert isinstance(result, Launch)
    assert result.arguments[1].values == (20, 20, 208)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "programs", "reason"),
    [
        ((floats("x", 100, 100, strides=(128, 1)),), 100, "x has gaps between its elements"),
        ((floats("x", 128), Scalar("n", 77)), 128, "n=77 is no size of a tensor"),
        ((floats("x", 128), floats("ids", 128, dtype="int64", most=5000.0)), 128, "ids holds values up to 5000"),
        ((floats("x", 7),), 7, "it has no size above 16"),
    ],
)
def test_what_cannot_be_told_is_not_guessed(arguments: tuple[Any, ...], programs: int, reason: str) -> None:
    launch = Launch(arguments, Grid((), (((), (programs,)),)))
    result = sizes.odd(launch)
    assert isinstance(result, str)
    assert reason in result


def test_a_grid_that_may_follow_two_sizes_is_not_guessed() -> None:
    arguments = (floats("x", 64, 64), floats("y", 128, 32), Scalar("n", 64))
    launch = Launch(arguments, Grid((), (((), (64 * 32, 1)), ((), (4096, 1)))))
    assert "follows no sizes" in str(sizes.odd(launch))


def test_constants_of_a_bare_function_are_its_axes() -> None:
    spec = spec_of(toy_recording.bare())
    result = grids.configs(spec, only(spec), grids.parse_grid(["BLOCK=64,128"], spec.axes), None)
    assert {config["BLOCK"]: reason for config, reason in result.items()} == {64: "", 128: ""}
    inputs = spec.inputs(only(spec), "cpu")
    outputs = spec.outputs(*inputs)
    spec.launch(NamedInts(BLOCK=128, num_warps=2, num_stages=3), inputs, outputs)
    assert torch.equal(outputs[0], inputs[0])


def test_launches_of_a_bare_function_that_differ_in_blocks_are_one() -> None:
    kernel = toy_recording.bare()
    (launch,) = kernel.launches
    other = replace(launch, arguments=(*launch.arguments[:-1], Scalar("BLOCK", 128, True)))
    own = Grid(("BLOCK",), (((128,), (2,)), ((64,), (4,))))
    spec = spec_of(replace(kernel, launches=(launch, replace(other, grid=own))))
    assert spec.configs == tuple(NamedInts(BLOCK=block, num_warps=2, num_stages=3) for block in (64, 128))
    assert spec.launches[only(spec)][0].count == 2


@pytest.mark.parametrize("is_loaded", [True, None])
def test_integers_that_were_never_read_are_no_zeros(is_loaded: bool | None) -> None:
    index = Tensor("index", "int32", (9,), (1,), storage=2, is_loaded=is_loaded)
    kernel = toy_recording.copies("hooked", 32, extra=(index,))
    with pytest.raises(UsageError, match="integers in index were never read"):
        spec_of(kernel)
    known = toy_recording.copies("hooked", 64)
    (notice,) = spec_of(replace(kernel, launches=(*kernel.launches, *known.launches))).notices
    assert notice.startswith("1 of 2 launches left out")


@pytest.mark.parametrize(
    ("constant", "value"), [({"float": "-inf"}, -math.inf), ({"float": "nan"}, math.nan), (0.5, 0.5)]
)
def test_a_constant_tensor_is_one_again(constant: Any, value: float) -> None:
    given = floats("x", 4, constant=constant, least=None, most=None, is_stored=True)
    launch = Launch((given,), Grid((), (((), (1,)),)))
    for is_exact in (False, True):
        case = Case((launch,), "cpu", frozenset(), frozenset(), is_exact)
        inputs, outputs = case.inputs(0), case.outputs()
        case.prepare(inputs, outputs)
        assert torch.equal(outputs[0], torch.full((4,), value)) or math.isnan(value)
        assert bool(outputs[0].isnan().all()) == math.isnan(value)


def test_hooks_of_the_autotuner_get_the_config_that_is_launched() -> None:
    import toy_kernels

    spec = spec_of(toy_recording.copies("hooked_tuner", 32))
    inputs = spec.inputs(only(spec), "cpu")
    toy_kernels.HOOKED.clear()
    assert spec.hook is not None
    spec.hook(NamedInts(BLOCK=128, num_warps=4, num_stages=3), inputs, spec.outputs(*inputs))
    assert toy_kernels.HOOKED == [128]
    assert spec.notices == ("its perf_model and top_k are not used: every config is timed",)


def test_a_hook_sets_block_shapes_of_descriptors_for_its_own_config_alone() -> None:
    blocks = (32, 64)
    x = floats("x", 128, 64, descriptor=(1, 1))
    y = written("y", 128, 64, storage=1, descriptor=(1, 1))
    grid = Grid(("BLOCK",), tuple(((block,), (128 // block,)) for block in blocks))
    kernel = toy_recording.kernel("described", blocks, Launch((x, y), grid), key=())
    kernel = replace(kernel, configs=tuple(replace(config, has_pre_hook=True) for config in kernel.configs))
    spec = spec_of(kernel)
    inputs = spec.inputs(only(spec), "cpu")
    outputs = spec.outputs(*inputs)
    for block in (*blocks, *blocks):
        outputs[0].zero_()
        spec.launch(NamedInts(BLOCK=block, num_warps=4, num_stages=3), inputs, outputs)
        assert torch.equal(outputs[0], inputs[0])
    assert inputs[-1].arguments(inputs, outputs)[0]["x"].block_shape == [1, 1]


def test_constants_that_are_blocks_by_name_stay_when_sizes_do_not() -> None:
    """``BD`` is the next power of two of ``D``, and no power of two any more if it followed the size."""
    constants = (Scalar("D", 128, True), Scalar("BD", 128, True), Scalar("BLOCK_N", 128, True))
    launch = Launch((floats("x", 4096, 128), *constants), Grid((), (((), (4096,)),)))
    made = sizes.odd(launch)
    assert isinstance(made, Launch)
    values = {item.name: item.value for item in made.arguments if isinstance(item, Scalar)}
    assert (values["BD"], values["BLOCK_N"]) == (128, 128)
    assert values["D"] == made.arguments[0].shape[1] < 128  # type: ignore[union-attr]


def test_a_dtype_that_data_names_imports_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches come out of databases too: dtypes are those of torch and of triton.language."""
    (tmp_path / "dtype_canary.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="none of torch"):
        decoded({"dtype": "dtype_canary.float32"})
    assert str(decoded({"dtype": "torch.float32"})) == "torch.float32"
    assert str(decoded({"dtype": "tl.float32"})) == "fp32"


def _with_table(**given: Any) -> Launch:
    """A launch that reads 64-bit integers from ``table``."""
    (launch,) = toy_recording.copies("plain").launches
    described = {"dtype": "int64", "mean": None, "deviation": None, "least": 0.0, "most": 5.0, "storage": 2}
    table = floats("table", 3, **{**described, **given})
    return replace(launch, arguments=(*launch.arguments, table))


ADDRESS = float(0x7F12_3456_7000)


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (replace(_with_table(), addresses=("table",)), "table holds addresses"),
        (replace(_with_table(most=ADDRESS), addresses=()), ""),
        (replace(_with_table(), addresses=()), ""),
        (_with_table(), ""),
        (_with_table(most=ADDRESS), "table may hold addresses"),
        (_with_table(most=ADDRESS, is_loaded=False), ""),
        (_with_table(most=ADDRESS, dtype="uint64"), "table may hold addresses"),
        (_with_table(most=float(2**62)), ""),
    ],
)
def test_a_launch_with_addresses_of_the_recorded_process_is_not_repeated(launch: Launch, reason: str) -> None:
    """Without compiled code any 64-bit integer where memory may lie counts as an address."""
    (other,) = toy_recording.copies("plain", 512).launches
    alone = replace(toy_recording.copies("plain"), launches=(launch,))
    both = replace(alone, launches=(launch, other))
    if not reason:
        assert repeatable(both) == (both, ())
        return
    with pytest.raises(UsageError, match=f"cannot be swept: 1 of 1 launches left out: {reason}"):
        repeatable(alone)
    left, (notice,) = repeatable(both)
    assert left.launches == (other,)
    assert notice.startswith(f"1 of 2 launches left out: {reason}")
    assert len(notice) < 200


def test_an_address_as_a_number_is_one_too() -> None:
    (launch,) = toy_recording.copies("plain", extra=(Scalar("to", int(ADDRESS)),)).launches
    with pytest.raises(UsageError, match="to may hold addresses"):
        repeatable(replace(toy_recording.copies("plain"), launches=(launch,)))


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(2, 40),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    zeros=st.sampled_from([0.0, 0.9, 0.9375, 0.9999]),
)
def test_data_that_varied_is_drawn_so_that_it_varies(seed: int, size: int, dtype: str, zeros: float) -> None:
    """Nearly all zeros in a small tensor would be zeros alone, on which no kernel is timed."""
    sparse = floats("x", size, dtype=dtype, least=0.0, most=1.0, mean=1 - zeros, deviation=0.1, zeros=zeros)
    (launch,) = toy_recording.copies("plain", size).launches
    case = Case((replace(launch, arguments=(sparse,)),), "cpu", frozenset(), frozenset())
    tensor = case.inputs(seed)[0].float()
    assert tensor.unique().numel() > 1
    assert tensor.min() >= 0
    assert tensor.max() <= 1


def test_values_that_a_pruner_adds_have_the_same_number_in_every_recording() -> None:
    """Rows of two recordings are of one kernel: which values its early_config_prune adds depends on the launches."""
    declared = (Config({"B": 8, "MODE": "a"}), Config({"B": 16, "MODE": "b"}))
    made = [Config({"B": b, "MODE": mode, "EVEN": even}) for b in (8, 24) for mode in "cab" for even in (True, False)]
    for order in (made, made[::-1], made[3:]):
        kernel = Kernel("kernel", configs=declared, pruner_configs=tuple(order))
        for config in order:
            row = configs.encoded(kernel, config)
            assert row == configs.encoded(replace(kernel, pruner_configs=tuple(made)), config)
            assert configs.decoded(kernel, row) == config
            assert type(configs.decoded(kernel, row).kwargs["EVEN"]) is bool
            assert row["EVEN"] == int(config.kwargs["EVEN"])
            assert row["B"] == config.kwargs["B"]
        rows = [configs.encoded(kernel, Config({"B": 8, "MODE": mode, "EVEN": True})) for mode in "ab"]
        assert [row["MODE"] for row in rows] == [0, 1]
        assert set(configs.axes(kernel)) == {"B", "MODE", "EVEN", "num_warps", "num_stages"}


def test_a_bound_goes_by_the_size_of_all_outputs() -> None:
    """An element near zero of a long sum is off by more than its own share."""
    spec = spec_of(toy_recording.copies("hooked", 4096), check="tolerance")
    assert spec.tolerance is not None
    expected = torch.cat([torch.full((1,), 1e-9), torch.full((99,), 100.0)]).double()
    rule = Rule.from_spec(spec)
    off = expected + 5e-4
    assert rule.difference(off.float(), expected) is None
    assert rule.difference((off + 0.01).float(), expected) is not None
    assert rule.difference(torch.full((100,), 5e-4), expected / 1e9) is not None, "all are small: the bound is, too"
    assert not bool(rule.differs(off.float(), expected))


def test_a_longer_sum_may_be_off_by_more() -> None:
    spec_short, spec_long = (spec_of(toy_recording.copies("hooked", n), check="tolerance") for n in (64, 10**8))
    assert spec_short.tolerance is not None
    assert spec_long.tolerance is not None
    assert spec_long.tolerance.rms > 100 * spec_short.tolerance.rms > 0


def test_a_bare_kernel_has_its_sizes_as_key() -> None:
    spec = spec_of(toy_recording.bare())
    assert spec.key == ("n",)
    assert spec.kernel.launches[0].key == (256, "torch.float32", "torch.float32")


def test_a_fixed_grid_leaves_a_bare_kernel_its_blocks() -> None:
    """Another block would need other programs."""
    kernel = toy_recording.bare()
    fixed = replace(kernel.launches[0], grid=Grid((), (((), (4,)),)))
    spec = spec_of(replace(kernel, launches=(fixed,)))
    assert set(spec.axes) == {"num_warps", "num_stages"}
    assert "its grid does not follow block sizes" in "".join(spec.notices)


def test_inputs_can_depend_on_the_config() -> None:
    import toy_kernels

    blocks = floats("order", 4, storage=2, dtype="int32", values=(3, 2, 1, 0), least=0.0, most=3.0)
    launch = Launch(
        (floats("x", 256), written("y", 256, storage=1), blocks, Scalar("n", 256)), by_blocks(256, (64, 128))
    )
    kernel = toy_recording.kernel("in_blocks", (64, 128), launch)
    plain, made = (
        build(kernel, toy_kernels.in_blocks, make_inputs=function, only_recorded_sizes=True)
        for function in (None, toy_kernels.backwards)
    )
    assert made.configs == plain.configs
    for spec, is_right in ((made, [True, True]), (plain, [True, False])):
        inputs = spec.inputs(only(spec), "cpu")
        results = []
        for config in spec.configs:
            (output,) = outputs = spec.outputs(*inputs)
            output.zero_()
            spec.launch(config, inputs, outputs)
            results.append(torch.equal(output, inputs[0]))
        assert results == is_right
    spec = build(kernel, toy_kernels.in_blocks, make_inputs=lambda config, **given: {"y": given["y"]})
    inputs = spec.inputs(only(spec), "cpu")
    outputs = spec.outputs(*inputs)
    with pytest.raises(UsageError, match="inputs gives 'y', which the kernel does not only read"):
        spec.launch(spec.configs[0], inputs, outputs)
