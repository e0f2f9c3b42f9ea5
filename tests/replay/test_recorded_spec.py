"""The spec of a recorded kernel: its problems, its grid, its tensors, and what one launch does."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import foreign_kernels
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_recording import by_blocks, copies, floats, kernel, softmax, written

from fp8tune.errors import UsageError
from fp8tune.measure.comparing import Rule
from fp8tune.plan import grids
from fp8tune.records import NamedInts
from fp8tune.replay import configs, sizes
from fp8tune.replay.case import Case
from fp8tune.replay.recording import Config, Grid, Kernel, Launch, Scalar, Tensor
from fp8tune.replay.spec import RecordedSpec, build, default_of, repeatable


def spec_of(recorded: Kernel, function: Any = None, **options: Any) -> RecordedSpec:
    return build(recorded, function or getattr(foreign_kernels, recorded.name.partition(":")[2]), **options)


def only(spec: RecordedSpec) -> Any:
    (problem,) = spec.recorded
    return problem


def gridded(spec: RecordedSpec, *texts: str, problem: Any = None) -> dict[NamedInts, str]:
    """Return the configs of ``--grid`` with the reasons why they are pruned."""
    axes = grids.parse_grid(texts, spec.axes)
    return dict(grids.configs(spec, problem or only(spec), axes, None, (), grids.named_axes(texts)))


def run(spec: RecordedSpec, config: dict[str, int]) -> tuple[Any, Any]:
    """Return the first input and the first output of a launch."""
    inputs = spec.inputs(only(spec), "cpu")
    outputs = spec.outputs(*inputs)
    spec.launch(NamedInts({"num_warps": 4, "num_stages": 3, **config}), inputs, outputs)
    return inputs[0], outputs[0]


def test_problems_have_the_key_first_then_dtypes_that_differ_and_no_strides() -> None:
    spec = spec_of(softmax(64, 96))
    problem = only(spec)
    assert list(problem.shape.items()) == [("columns", 96), ("rows", 64)]
    assert spec.lookup_key(problem) == NamedInts(columns=96)
    assert (problem.input_layout[:9], problem.fp8_dtype, problem.routing) == ("recorded-", "", "none")
    assert spec.bytes_moved(problem.shape) == 2 * 64 * 96 * 4
    rest = (Scalar("n", 256), Scalar("scale", 0.5), Scalar("MODE", "silu", True), Scalar("TO", {"dtype": "tl.x"}, True))
    launches = [
        Launch((floats("x", 256, dtype=dtype), written("y", 256, dtype=dtype), *rest), by_blocks(256))
        for dtype in ("float32", "float16")
    ]
    spec = spec_of(kernel("cast", *launches, key=("n", "MODE", "TO", "gone")))
    first, second = spec.recorded
    assert spec.key == ("n", "MODE", "TO", "x_dtype", "y_dtype")
    assert first.shape["MODE"] == second.shape["MODE"]
    assert spec.bytes_moved(first.shape) == 2 * spec.bytes_moved(second.shape)
    large = spec_of(copies("copied", 256, Scalar("B", 2**31)))  # larger than any size
    assert dict(only(large).shape) == {"n": 256}


def test_the_grid_is_the_declared_configs_and_each_widened() -> None:
    spec = spec_of(softmax())
    result = gridded(spec, "ROWS=4", "num_warps=4,8")
    assert next(iter(result)) == spec.default == NamedInts(ROWS=1, num_warps=4, num_stages=3)
    assert [(config["ROWS"], config["num_warps"]) for config in result][2:] == [(4, 4), (4, 8)]
    assert [config["ROWS"] for config in grids.configs(spec, only(spec), spec.axes, None)] == [1, 2]
    result = gridded(spec, "ROWS=3")
    assert "the recording has no grid for" in result[NamedInts(ROWS=3, num_warps=4, num_stages=3)]


def test_values_that_a_pruner_adds_have_the_same_number_in_every_recording() -> None:
    """Rows of two recordings are of one kernel: which values its early_config_prune adds depends on the launches."""
    declared = (Config({"B": 8, "MODE": "a"}), Config({"B": 16, "MODE": "b"}))
    made = [Config({"B": b, "MODE": mode, "EVEN": even}) for b in (8, 24) for mode in "cab" for even in (True, False)]
    whole = Kernel("kernel", configs=declared, pruner_configs=tuple(made))
    for order in (made, made[::-1], made[3:]):
        recorded = replace(whole, pruner_configs=tuple(order))
        for config in order:
            row = configs.encoded(recorded, config)
            assert row == configs.encoded(whole, config)
            assert repr(configs.decoded(recorded, row)) == repr(config)  # True is no 1
        assert [configs.encoded(recorded, Config({"B": 8, "MODE": mode}))["MODE"] for mode in "ab"] == [0, 1]
        assert set(configs.axes(recorded)) == {"B", "MODE", "EVEN", "num_warps", "num_stages"}
    with pytest.raises(ValueError, match="'\"c\"'"):  # without such a pruner, no value is added
        configs.encoded(replace(whole, pruner_configs=()), Config({"B": 8, "MODE": "c"}))


def test_a_bare_kernel_has_a_config_for_each_launch_and_its_sizes_as_key() -> None:
    arguments = (floats("x", 256), written("y", 256), Scalar("n", 256), Scalar("B", 64, True))
    launch = Launch(arguments, by_blocks(256, 64, 128), options={"num_warps": 2})
    bare = Kernel("foreign_kernels:copy", is_autotuned=False, launches=(launch,))
    spec = spec_of(bare)
    assert (spec.key, spec.kernel.launches[0].key) == (("n",), (256, "torch.float32", "torch.float32"))
    result = gridded(spec, "B=64,128")
    assert {config["B"]: reason for config, reason in result.items()} == {64: "", 128: ""}
    assert torch.equal(*run(spec, {"B": 128}))
    grouped = replace(launch, arguments=(*arguments, Scalar("GROUP_SIZE_M", 8, True), Scalar("GROUP", 2, True)))
    assert configs.as_autotuned(replace(bare, launches=(grouped,))).configs[0].kwargs == {"B": 64, "GROUP_SIZE_M": 8}
    second = replace(launch, arguments=(*arguments[:-1], Scalar("B", 128, True)), grid=by_blocks(256, 128, 64))
    spec = spec_of(replace(bare, launches=(launch, second)))
    assert spec.configs == tuple(NamedInts(B=block, num_warps=2, num_stages=3) for block in (64, 128))
    assert spec.launches[only(spec)][0].count == 2
    fixed = replace(launch, grid=Grid((), (((), (4,)),)))  # another block would need other programs
    spec = spec_of(replace(bare, launches=(fixed,)))
    assert set(spec.axes) == {"num_warps", "num_stages"}
    assert "its grid does not follow block sizes" in "".join(spec.notices)


def launched(n: int, block: int, warps: int, *, is_fixed: bool = False, **fields: Any) -> Launch:
    """Return a launch of a bare kernel, with a function or a tuple as grid."""
    arguments = (floats("x", n), written("y", n), Scalar("n", n), Scalar("B", block, True))
    grid = Grid((), (((), (-(-n // block),)),)) if is_fixed else by_blocks(n, 64, 128, 256, 512)
    return Launch(arguments, grid, options={"num_warps": warps}, **fields)


def bare_spec(*launches: Launch, **options: Any) -> RecordedSpec:
    return spec_of(Kernel("foreign_kernels:copy", is_autotuned=False, launches=launches), **options)


def test_the_default_of_a_bare_kernel_is_what_each_launch_was_made_with() -> None:
    spec = bare_spec(launched(1000, 64, 1), launched(4096, 512, 8))
    own = [default_of(spec, problem) for problem in spec.recorded]
    assert own == [NamedInts(B=64, num_warps=1, num_stages=3), NamedInts(B=512, num_warps=8, num_stages=3)]
    assert [[*gridded(spec, problem=problem)] for problem in spec.recorded] == [own[:1], own[1:]]
    inputs = [spec.inputs(problem, "cpu") for problem in spec.recorded]
    assert all(torch.equal(spec.reference(*tensors)[0], tensors[0].double()) for tensors in inputs)
    odd = [edge.problem for problem in spec.recorded for edge in spec.edges(problem) if edge.name == "odd sizes"]
    assert [default_of(spec, problem) for problem in odd] == own
    often = bare_spec(launched(1000, 64, 1), launched(1000, 128, 2, count=2), launched(4096, 64, 1))
    assert [default_of(often, problem)["B"] for problem in often.recorded] == [128, 64]
    assert "several configs in 1 of 2 launches" in "".join(often.notices)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            ("B=64,512", "num_warps=1,8"),
            [[(64, 1), (64, 8), (512, 1), (512, 8)], [(512, 8), (64, 1), (64, 8), (512, 1)]],
        ),
        (("B=64,512",), [[(64, 1), (512, 1)], [(512, 8), (64, 8)]]),
        (("num_warps=2,4",), [[(64, 1), (64, 2), (64, 4)], [(512, 8), (512, 2), (512, 4)]]),
        (("B=128",), [[(64, 1), (128, 1)], [(512, 8), (128, 8)]]),
        (("B=64,512", "B<=128"), [[(64, 1)], [(512, 8), (64, 8)]]),
    ],
)
def test_the_grid_of_a_bare_kernel_is_a_product_around_each_launchs_own_config(
    texts: tuple[str, ...], expected: list[list[tuple[int, int]]]
) -> None:
    """Values of launches and others, in any order."""
    spec = bare_spec(launched(1000, 64, 1), launched(4096, 512, 8))
    axes = grids.parse_grid(texts, spec.axes)
    facts = axes, None, grids.parse_conditions(texts, axes), grids.named_axes(texts)
    tried = [
        [
            (config["B"], config["num_warps"])
            for config, pruned in grids.configs(spec, problem, *facts).items()
            if not pruned
        ]
        for problem in spec.recorded
    ]
    assert tried == expected


def test_a_constant_varies_only_where_the_grid_of_that_launch_follows_it() -> None:
    spec = bare_spec(launched(4096, 512, 8, is_fixed=True), launched(1000, 64, 1))
    fixed, following = (gridded(spec, "B=64,512", "num_warps=1,8", problem=problem) for problem in spec.recorded)
    assert {(config["B"], config["num_warps"]): reason for config, reason in fixed.items()} == {
        **{(512, warps): "" for warps in (8, 1)},
        **{(64, warps): "its grid does not follow B" for warps in (1, 8)},
    }
    assert not any(following.values())
    assert "the grid of 1 of 2 launches does not follow block sizes" in "".join(spec.notices)
    both = bare_spec(*(launched(512, block, 4, is_fixed=True) for block in (64, 128)), launched(1000, 64, 1))
    problem = both.recorded[0]  # two fixed grids of one size: a table has no place for the second
    tensors, output = both.inputs(problem, "cpu"), torch.zeros(512)
    both.launch(default_of(both, problem), tensors, (output,))
    assert (len(gridded(both, problem=problem)), torch.equal(tensors[0], output)) == (1, True)


# What is right


def test_a_config_that_disagrees_with_itself_is_no_reference() -> None:
    def draw(y: Any, **_: Any) -> None:
        y.copy_(torch.rand(y.shape))

    drawing = SimpleNamespace(configs=(), arg_names=("x", "y", "n"), fn=SimpleNamespace(run=draw), run=None)
    spec = spec_of(copies("copied", 32), drawing)
    with pytest.raises(ValueError, match="is not deterministic: launched twice, 32 of 32 elements of y differ"):
        spec.reference(*spec.inputs(only(spec), "cpu"))


def test_elements_that_the_first_config_leaves_are_nobodys() -> None:
    """A kernel may fill a part of its output: what it leaves is no fault of any config."""
    recorded = copies("drops_tail", 192)
    x, y, n = recorded.launches[0].arguments
    launch = replace(recorded.launches[0], arguments=(x, replace(y, shape=(200,)), n))
    spec = spec_of(replace(recorded, launches=(launch,)))
    inputs = spec.inputs(only(spec), "cpu")
    (expected,) = spec.reference(*inputs)
    output = torch.full((200,), 5.0)
    assert spec.prepare is not None
    spec.prepare(inputs, (output,))
    assert output[192:].tolist() == expected[192:].tolist() == [0.0] * 8
    assert output[:192].tolist() == [5.0] * 192


def test_a_bound_goes_by_the_size_of_all_outputs_and_the_length_of_the_sum() -> None:
    """An element near zero of a long sum is off by more than its own share."""
    bound, longer = (spec_of(copies("copied", n)).tolerance for n in (4096, 10**8))
    x, y, n = copies().launches[0].arguments
    integers = Launch((x, replace(y, dtype="int32"), n), by_blocks(256))
    assert spec_of(kernel("copied", integers)).check == "exact"
    assert bound is not None
    assert longer is not None
    assert longer.rms > 10 * bound.rms > 0
    expected = torch.cat([torch.full((1,), 1e-9), torch.full((99,), 100.0)]).double()
    rule, off = Rule.from_spec(spec_of(copies("copied", 4096))), expected + 5e-4
    assert rule.difference(off.float(), expected) is None
    assert rule.difference((off + 0.01).float(), expected) is not None
    assert rule.difference(torch.full((100,), 5e-4), expected / 1e9) is not None, "all are small: the bound is, too"


# Tensors


def made(*arguments: Tensor, is_exact: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    case = Case((Launch(arguments, Grid((), (((), (1,)),))),), "cpu", is_exact=is_exact)
    inputs, outputs = case.inputs(seed), case.outputs()
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
    assert (tensor.shape, tensor.stride(), str(tensor.dtype)) == (tuple(shape), tuple(strides), f"torch.{dtype}")
    first = tensor.storage_offset() * tensor.element_size()
    assert first % 16 == (0 if alignment == 16 or tensor.element_size() > alignment else alignment)


def test_values_have_the_recorded_distribution() -> None:
    x = made(floats("x", 100, 1000, mean=2.0, deviation=0.5, least=1.0, most=4.0, zeros=0.25))["x"]
    assert (x == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert x[x != 0].mean().item() == pytest.approx(2.0, abs=0.05)
    assert 1.0 <= x[x != 0].min().item() <= x.max().item() <= 4.0
    ends = made(floats("x", 50, dtype="int64", least=3.0, most=90.0, is_sorted=True))["x"].tolist()
    assert (ends, ends[0], ends[-1]) == (sorted(ends), 3, 90)
    assert made(floats("x", 4, strides=(0,)))["x"].unique().numel() == 1
    for fields, expected, exact in (
        ({"least": 0.7, "most": 0.7}, 0.7, 0.5),  # sums of powers of two are exact
        ({"constant": {"float": "-inf"}, "is_stored": True}, -math.inf, -math.inf),  # what a maximum begins with
        ({"constant": {"float": "nan"}, "is_stored": True}, math.nan, math.nan),
    ):
        for is_exact, value in ((False, expected), (True, exact)):
            x = made(floats("x", 4, **{"least": None, "most": None, **fields}), is_exact=is_exact)["x"]
            assert torch.equal(x.view(torch.float32).nan_to_num(5), torch.full((4,), value).nan_to_num(5))


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(2, 40),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
    zeros=st.sampled_from([0.0, 0.9, 0.9999]),
)
def test_data_that_varied_is_drawn_so_that_it_varies(seed: int, size: int, dtype: str, zeros: float) -> None:
    """Nearly all zeros in a small tensor would be zeros alone, on which no kernel is timed."""
    sparse = floats("x", size, dtype=dtype, least=0.0, most=1.0, mean=1 - zeros, deviation=0.1, zeros=zeros)
    tensor = made(sparse, seed=seed)["x"].float()
    assert tensor.unique().numel() > 1
    assert 0 <= tensor.min() <= tensor.max() <= 1


def test_arguments_that_share_memory_still_do_whatever_their_dtypes() -> None:
    left, right = (floats(name, shape=(4, 2), strides=(4, 1), offset=at) for name, at in (("left", 0), ("right", 2)))
    for first, second, elements in (
        (left, replace(right, is_stored=True), 2),
        (floats("left", 4), written("right", 16, dtype="int8", storage=0), 0),
    ):
        tensors = made(first, second)
        assert tensors["right"].shape == second.shape
        assert tensors["right"].data_ptr() - tensors["left"].data_ptr() == 4 * elements


# Odd sizes


CONSTANTS = (Scalar("D", 128, True), Scalar("BD", 128, True), Scalar("BLOCK_N", 128, True))
ENDS = floats("ends", 3, dtype="int32", values=(100, 100, 1024), storage=2)
PROGRAMS = Grid((), (((), (128,)),))
TWO_FORMS = (floats("x", 64, 64), floats("y", 128, 32), Scalar("n", 64))


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        # multiples of 16 stay such, and strides follow
        (softmax(64, 96).launches[0], {"x": (48, 80), "rows": 48, "columns": 80, "stride": 80}),
        (copies("copied", 1001).launches[0], {"n": 157}),
        (Launch((floats("x", 1024), ENDS, Scalar("n", 1024)), by_blocks(1024, 64)), {"ends": (20, 20, 208)}),
        # BD is the next power of two of D, and no power of two any more if it followed the size
        (
            Launch((floats("x", 4096, 128), *CONSTANTS), Grid((), (((), (4096,)),))),
            {"x": (208, 112), "D": 112, "BD": 128, "BLOCK_N": 128},
        ),
        # what cannot be told is not guessed
        (Launch((floats("x", 100, 128, strides=(256, 1)),), PROGRAMS), "x has gaps between its elements"),
        (Launch((floats("x", 128), Scalar("n", 77)), PROGRAMS), "n=77 is no size of a tensor"),
        (Launch((floats("x", 128), floats("ids", 128, dtype="int64", most=5e3)), PROGRAMS), "ids holds values up to"),
        (Launch((floats("x", 7),), PROGRAMS), "it has no size above 16"),
        (Launch(TWO_FORMS, Grid((), (((), (64 * 32, 1)), ((), (4096, 1))))), "follows no sizes"),
    ],
)
def test_sizes_become_odd_everywhere_or_stay(launch: Launch, expected: dict[str, Any] | str) -> None:
    result = sizes.odd(launch)
    if isinstance(expected, str):
        assert expected in str(result)
        return
    assert isinstance(result, Launch), result
    by_name = {item.name: item for item in result.arguments}
    for name, value in expected.items():
        item = by_name[name]
        assert (item.value if isinstance(item, Scalar) else item.values or item.shape) == value
    if "rows" in expected:
        assert result.grid.programs({"ROWS": 2}) == (24,)


# Launches that cannot be repeated


def with_table(**fields: Any) -> Launch:
    """Return a launch that reads 64-bit integers from ``table``."""
    described = {"dtype": "int64", "mean": None, "deviation": None, "least": 0.0, "most": 5.0, "storage": 2}
    return copies("copied", 256, floats("table", 3, **{**described, **fields})).launches[0]


ADDRESS = float(0x7F12_3456_7000)
UNREAD = {"least": None, "most": None, "values": None}


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (replace(with_table(), addresses=("table",)), "table holds addresses"),
        (replace(with_table(most=ADDRESS), addresses=()), ""),
        (with_table(), ""),
        # without compiled code any 64-bit integer where memory may lie counts as an address
        (with_table(most=ADDRESS, dtype="uint64"), "table may hold addresses"),
        (with_table(most=ADDRESS, is_loaded=False), ""),
        (with_table(most=float(2**62)), ""),
        (copies("copied", 256, Scalar("to", int(ADDRESS))).launches[0], "to may hold addresses"),
        (with_table(**UNREAD, is_loaded=None), "integers in table were never read"),  # zeros would be other indices
        (with_table(**UNREAD, is_loaded=False), ""),
    ],
)
def test_a_launch_of_unknown_integers_or_addresses_is_left_out(launch: Launch, reason: str) -> None:
    (second,) = copies("copied", 512).launches
    alone = replace(copies(), launches=(launch,))
    both = replace(alone, launches=(launch, second))
    if not reason:
        assert repeatable(both) == (both, ())
        return
    with pytest.raises(UsageError, match=f"cannot be swept: 1 of 1 launches left out: {reason}"):
        repeatable(alone)
    left, (notice,) = repeatable(both)
    assert (left.launches, len(notice) < 200) == ((second,), True)
    assert notice.startswith(f"1 of 2 launches left out: {reason}")


# Hooks and the user's inputs


def test_hooks_get_the_config_that_is_launched() -> None:
    spec = spec_of(copies("hooked", 32))
    inputs = spec.inputs(only(spec), "cpu")
    foreign_kernels.HOOKED.clear()
    assert spec.hook is not None
    spec.hook(NamedInts(B=128, num_warps=4, num_stages=3), inputs, spec.outputs(*inputs))
    assert foreign_kernels.HOOKED == [128]
    assert spec.notices == ("its perf_model and top_k are not used: every config is timed",)
    x, y = floats("x", 64, 64, descriptor=(1, 1)), written("y", 64, 64, descriptor=(1, 1))
    grid = Grid(("ROWS",), tuple(((rows,), (64 // rows,)) for rows in (16, 32)))
    declared = tuple(Config({"ROWS": rows}, has_pre_hook=True) for rows in (16, 32))
    launch = Launch((x, y, Scalar("rows", 64)), grid)
    spec = spec_of(kernel("copy_rows", launch, key=("rows",), configs=declared))
    inputs = spec.inputs(only(spec), "cpu")
    outputs = spec.outputs(*inputs)
    for rows in (16, 32):  # a hook sets the block shape of descriptors for its own config alone
        spec.launch(NamedInts(ROWS=rows, num_warps=4, num_stages=3), inputs, outputs)
        assert torch.equal(inputs[0], outputs[0])
        outputs[0].zero_()
        assert inputs[-1].arguments(inputs, outputs)[0]["x"].block_shape == [1, 1]


def test_inputs_can_depend_on_the_config() -> None:
    order = floats("order", 4, storage=2, dtype="int32", values=(3, 2, 1, 0), least=0.0, most=3.0)
    arguments = (floats("x", 256), written("y", 256), order, Scalar("n", 256))
    recorded = kernel("in_blocks", Launch(arguments, by_blocks(256)))
    for function, is_right in ((None, [True, False]), (foreign_kernels.backwards, [True, True])):
        spec = spec_of(recorded, make_inputs=function, only_recorded_sizes=True)
        assert [torch.equal(*run(spec, dict(config))) for config in spec.configs] == is_right
    # Where a config is only compiled, there is no data; the function looks at recorded integers all the same.
    launched: list[dict[str, Any]] = []
    bare = SimpleNamespace(run=lambda **arguments: launched.append(arguments), arg_names=("x", "y", "order", "n", "B"))
    for device in ("meta", "cpu"):
        spec = spec_of(recorded, bare, make_inputs=lambda config, *, order, **_: {"order": order + order.tolist()[0]})
        inputs = spec.inputs(only(spec), device)
        spec.launch(spec.default, inputs, spec.outputs(*inputs))
        assert launched[-1]["order"].device.type == device
    assert launched[-1]["order"].tolist() == [6, 5, 4, 3]
    spec = spec_of(recorded, make_inputs=lambda config, **arguments: {"y": arguments["y"]})
    with pytest.raises(UsageError, match="inputs gives 'y', which the kernel does not only read"):
        run(spec, dict(spec.default))
