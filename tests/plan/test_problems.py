import itertools
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.plan import grids, shapes
from fp8tune.plan import problems as plan
from fp8tune.plan.shapes import Settings
from fp8tune.records import NamedInts, Problem
from fp8tune.replay.loading import load_spec
from fp8tune_kernels import catalog
from fp8tune_kernels.spec import LAUNCH_OPTIONS, ROUTINGS, SCALE_MODES, DeviceLimits, KernelSpec

AXES = {"BLOCK_SIZE": (32, 64), "UNROLL": (1, 3), "num_warps": (4, 8), "num_stages": (1, 2, 3), "waves_per_eu": (0, 2)}
LIMITS = DeviceLimits("sm_90", 32, 232_448, 65_536, 132)


def activations(row):
    yield NamedInts(M=row["M"], K=row["K"], G=row["E"])
    yield NamedInts(M=row["M"], K=row["N"], G=row["E"])


def not_run(*_):
    raise AssertionError("planning runs no kernel")


SPEC = KernelSpec(
    name="planned",
    axes=AXES,
    default=NamedInts(num_stages=2, num_warps=4, BLOCK_SIZE=128, UNROLL=1, waves_per_eu=0),
    key=("K", "G"),
    problems=activations,
    inputs=not_run,
    outputs=not_run,
    launch=not_run,
    reference=not_run,
    bytes_moved=lambda shape: 3 * shape["M"] * shape["K"],
    scaled_down=lambda problem: replace(problem, shape=NamedInts(M=16, K=min(problem.shape["K"], 8), G=2)),
    invalid=lambda config, shape, limits: "too many warps" if config["num_warps"] == 8 else None,
    routed=True,
    uses_fp8=True,
    scale_modes=SCALE_MODES,
)
PROBLEM = Problem("planned", NamedInts(M=64, K=32, G=4), "jagged")
ROW = NamedInts(M=64, K=32, N=48, E=4)


# grids


def test_a_grid_narrows_and_widens_only_the_axes_it_names():
    assert grids.parse_grid([], AXES) == AXES
    assert grids.parse_grid(["num_warps=16", " BLOCK_SIZE = 32 , 512 "], AXES) == AXES | {
        "num_warps": (16,),
        "BLOCK_SIZE": (32, 512),
    }


def test_a_grid_keeps_the_order_of_the_axes_and_drops_repeats():
    assert list(grids.parse_grid(["waves_per_eu=2,0,2", "UNROLL=5"], AXES).items())[1:] == [
        ("UNROLL", (5,)),
        ("num_warps", (4, 8)),
        ("num_stages", (1, 2, 3)),
        ("waves_per_eu", (2, 0)),
    ]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["num_warps"], "grid 'num_warps' is not of the form AXIS=VALUE,VALUE"),
        (["num_warps="], "is not of the form"),
        (["num_warp=4"], "unknown grid axis 'num_warp': did you mean num_warps"),
        (["=4"], "unknown grid axis ''"),
        (["num_warps=4", "num_warps=8"], "num_warps is given twice"),
        (["num_warps=6"], "num_warps takes powers of two, not 6"),
        (["BLOCK_SIZE=48"], "BLOCK_SIZE takes powers of two, not 48"),
        (["num_stages=0"], "num_stages takes integers from 1 to 1048576, not '0'"),
        (["num_stages=4,,5"], "not ''"),
        (["num_stages=-1"], "not '-1'"),
        (["num_stages=1_0"], "not '1_0'"),
        (["num_stages=٣"], "not '٣'"),
        (["BLOCK_SIZE=" + "9" * 5000], "BLOCK_SIZE takes integers from 1 to 1048576"),
        (["num_stages=2=3"], "not '2=3'"),
    ],
)
def test_a_grid_that_triton_cannot_take_is_refused(texts, complaint):
    with pytest.raises(UsageError, match=complaint):
        grids.parse_grid(texts, AXES)


@given(st.lists(st.one_of(st.text(max_size=20), st.from_regex(r"(num_warps|BLOCK_SIZE|UNROLL)=[0-9,]{0,9}"))))
def test_any_grid_gives_the_same_axes_or_a_one_line_error(texts):
    try:
        grid = grids.parse_grid(texts, AXES)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert list(grid) == list(AXES)
        assert all(values and len(set(values)) == len(values) for values in grid.values())


@given(
    st.fixed_dictionaries(
        {}, optional={name: st.lists(st.sampled_from(AXES[name]), min_size=1, unique=True) for name in AXES}
    )
)
def test_a_grid_of_declared_values_is_taken_as_written(chosen):
    texts = [f"{name}={','.join(map(str, values))}" for name, values in chosen.items()]
    assert grids.parse_grid(texts, AXES) == AXES | {name: tuple(values) for name, values in chosen.items()}


# problems


def test_problems_come_in_order_once_each_for_every_layout():
    spec = replace(SPEC, input_layouts=("contiguous", "transposed"))
    swapped = NamedInts(M=64, K=48, N=32, E=4)
    found = plan.problems(spec, [ROW, swapped, ROW], Settings(routing="zipf", scale="exact", seed=7), arch="gfx942")
    assert found == [
        Problem("planned", NamedInts(M=64, K=k, G=4), "zipf", layout, "bfloat16", "float8_e4m3fnuz", "exact", 7)
        for k in (32, 48)
        for layout in ("contiguous", "transposed")
    ]


@pytest.mark.parametrize(
    ("arch", "wanted"),
    [("sm_90", ["float8_e4m3fn", "bfloat16"]), ("gfx942", ["float8_e4m3fnuz", "bfloat16"])],
)
def test_fp8_formats_of_other_arches_are_left_out_unless_named(arch, wanted):
    spec = replace(SPEC, in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"))
    found = plan.problems(spec, [ROW], arch=arch)
    assert [*dict.fromkeys(problem.in_dtype for problem in found)] == wanted
    named, _ = plan.problems(spec, [ROW], Settings(dtype="float8_e4m3fnuz"), arch="sm_90")
    assert named.in_dtype == "float8_e4m3fnuz"


def test_a_listed_grid_is_narrowed_and_widened():
    spec = load_spec("grouped-rows")
    problem = Problem("grouped-rows", NamedInts(M=16640, N=8192, K=5120, G=16), "jagged", in_dtype="bfloat16")

    def grid(*texts):
        return [*grids.configs(spec, problem, grids.parse_grid(texts, spec.axes), None)][1:]

    assert {*grid()} == {*spec.configs} - {spec.default}
    assert {config["num_warps"] for config in grid("num_warps=4")} == {4}
    assert {*grid("num_warps=4")} < {*spec.configs}
    assert {config["num_stages"] for config in grid("num_stages=4,6")} == {4, 6}


def test_a_kernel_without_groups_has_no_routing():
    assert {problem.routing for problem in plan.problems(replace(SPEC, routed=False), [ROW])} == {"none"}


def test_the_scale_mode_is_the_first_declared_one_unless_named():
    mx = replace(SPEC, scale_modes=("floor", "rceil"))
    assert {problem.scale_mode for problem in plan.problems(mx, [ROW])} == {"floor"}
    with pytest.raises(UsageError, match="unknown scale mode of planned 'exact': known: floor, rceil"):
        plan.problems(mx, [ROW], Settings(scale="exact"))


def test_a_row_without_n_gives_the_problems_that_need_none():
    activations_alone = NamedInts(M=64, K=32, E=4)
    assert [problem.shape for problem in plan.problems(SPEC, [activations_alone])] == [NamedInts(M=64, K=32, G=4)]
    weights = replace(SPEC, problems=lambda row: iter([NamedInts(E=row["E"], N=row["N"], K=row["K"])]))
    with pytest.raises(UsageError, match="hold no problem for planned"):
        plan.problems(weights, [activations_alone])


def test_a_key_error_that_is_the_specs_own_fault_is_not_hidden():
    def broken(row):
        raise KeyError("N")
        yield

    with pytest.raises(UsageError, match=r"test_problems.py:\d+: problems of planned raised KeyError: 'N'"):
        plan.problems(replace(SPEC, problems=broken), [ROW])


def of_heads(row):
    yield NamedInts(rows=row["rows"], cols=row["cols"])
    yield NamedInts(rows=row["rows"], cols=row["heads"])


def test_a_row_without_a_dim_holds_no_problem_that_needs_it():
    spec = replace(SPEC, problems=of_heads, key=("cols",), bytes_moved=lambda shape: 4 * shape["rows"] * shape["cols"])
    rows = [NamedInts(rows=8, cols=9, heads=2), NamedInts(rows=3, cols=4), NamedInts(M=3)]
    found = [str(problem.shape) for problem in plan.problems(spec, rows)]
    assert found == ["rows=8 cols=9", "rows=8 cols=2", "rows=3 cols=4"]


def test_rows_that_all_lack_a_dim_say_what_was_asked_and_what_there_is():
    spec = replace(SPEC, problems=of_heads)
    message = r"hold no problem for planned: its problems ask for rows, and the shapes have M, K, N, E, heads; give"
    with pytest.raises(UsageError, match=message):
        plan.problems(spec, [ROW, NamedInts(heads=3)])


def test_each_problem_is_swept_with_each_dtype():
    spec = replace(SPEC, in_dtypes=("float16", "float32"), key=("K", "in_dtype"))
    found = plan.problems(spec, [NamedInts(M=64, K=32, N=32, E=4)])
    assert [problem.in_dtype for problem in found] == ["float16", "float32"]
    assert [spec.lookup_key(problem) for problem in found] == [NamedInts(K=32, in_dtype=1), NamedInts(K=32, in_dtype=2)]
    assert [problem.in_dtype for problem in plan.problems(spec, [ROW], Settings(dtype="int8"))] == ["int8", "int8"]


def test_a_kernel_that_declares_no_fp8_has_none():
    (problem, _) = plan.problems(replace(SPEC, uses_fp8=False, scale_modes=()), [ROW], Settings(scale="exact"))
    assert (problem.fp8_dtype, problem.scale_mode) == ("", "")


def test_a_recorded_kernel_has_the_problems_of_its_recording():
    recorded = (Problem("a:b", NamedInts(n=3), "none", "recorded-0123456789ab", "int32", "", ""),)
    assert plan.problems(replace(SPEC, recorded=recorded), [ROW]) == list(recorded)


def test_bytes_are_counted_with_the_dtype_of_the_problem():
    def inputs(problem, device):
        return (torch.empty(problem.shape["M"], 8, dtype=getattr(torch, problem.in_dtype), device=device),)

    spec = replace(SPEC, inputs=inputs, outputs=lambda x: (torch.empty_like(x),), bytes_moved=None)
    dtypes = ("bfloat16", "float16", "float32", "int8")
    assert [spec.bytes_of(replace(PROBLEM, in_dtype=dtype)) for dtype in dtypes] == [2048, 2048, 4096, 1024]
    assert spec.bytes_moved(PROBLEM.shape) == 2048


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (NamedInts(rows=4096), "rows=131"),
        (NamedInts(rows=4096, cols=16), "rows=131 cols=16"),
        (NamedInts(b=64, h=64, M=64, d=64), "b=37 h=37 M=64 d=37"),
        (NamedInts(M=4096, K=4096, N=4096, E=64), "M=157 K=101 N=67 E=2"),
    ],
)
def test_dims_of_any_name_are_scaled_down_for_the_interpreter(shape, expected):
    assert str(replace(SPEC, scaled_down=None).scaled_down(replace(PROBLEM, shape=shape)).shape) == expected


@pytest.mark.parametrize(
    ("problems", "complaint"),
    [
        (lambda row: iter([1 / 0]), r"test_problems.py:\d+: problems of planned raised ZeroDivisionError"),
        (lambda row: None, "problems of planned raised TypeError"),
        (lambda row: sys.exit(3), r"test_problems.py:\d+: problems of planned raised SystemExit: 3"),
        (lambda row: iter([dict(row)]), "yield NamedInts"),
        (lambda row: iter([NamedInts(M=-1)]), r"NamedInts\(M=-1\): yield"),
        (lambda row: iter([NamedInts({"lambda": 1})]), "lambda"),
        (lambda row: iter([NamedInts(M=2**63)]), "yield NamedInts of sizes"),
    ],
)
def test_problems_that_fail_are_one_line(problems, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        plan.problems(replace(SPEC, problems=problems), [ROW])
    assert len(str(caught.value).splitlines()) == 1


# configs


def test_configs_are_the_default_and_then_the_product_in_declaration_order():
    configs = list(grids.configs(SPEC, PROBLEM, AXES, None))
    assert configs[0] == SPEC.default
    assert [tuple(config.values()) for config in configs[1:]] == list(itertools.product(*AXES.values()))
    assert all(list(config) == list(AXES) for config in configs)


def test_a_default_inside_the_grid_is_tried_once():
    grid = grids.parse_grid(["BLOCK_SIZE=128,32"], AXES)
    assert len(grids.configs(SPEC, PROBLEM, grid, None)) == 2 * 2 * 2 * 3 * 2


def test_a_narrowed_grid_still_tries_the_default():
    grid = grids.parse_grid(["BLOCK_SIZE=64", "UNROLL=3", "num_warps=4", "num_stages=1", "waves_per_eu=2"], AXES)
    assert list(grids.configs(SPEC, PROBLEM, grid, None)) == [
        SPEC.default,
        NamedInts(BLOCK_SIZE=64, UNROLL=3, num_warps=4, num_stages=1, waves_per_eu=2),
    ]


def test_pruned_configs_stay_with_their_reason_and_the_default_is_never_one():
    for config, pruned in grids.configs(SPEC, PROBLEM, AXES, LIMITS).items():
        assert pruned == ("too many warps" if config["num_warps"] == 8 else "")
    spec = replace(SPEC, invalid=lambda config, shape, limits: "never")
    default, *others = grids.configs(spec, PROBLEM, AXES, LIMITS).items()
    assert default == (SPEC.default, "")
    assert {pruned for _, pruned in others} == {"never"}


def test_the_interpreter_tries_each_set_of_block_sizes_once_on_each_scaled_down_problem():
    problems = plan.scaled_down(SPEC, plan.problems(SPEC, [ROW, NamedInts(M=64, K=4, N=32, E=2)]))
    assert list(dict.fromkeys(problem.shape["K"] for problem in problems)) == [8, 4]
    for configs in (grids.interpreter_configs(SPEC, problem, AXES) for problem in problems):
        assert [(config["BLOCK_SIZE"], config["UNROLL"]) for config in configs] == [
            (128, 1),
            (32, 1),
            (32, 3),
            (64, 1),
            (64, 3),
        ]
        assert all(
            config[name] == SPEC.default[name] for config in configs for name in LAUNCH_OPTIONS if name in config
        )


# the kernels and the sets that come with fp8tune


@pytest.mark.parametrize("kernel", catalog.KERNELS)
@pytest.mark.parametrize("name", shapes.list_sets())
def test_every_kernel_has_problems_in_every_set(kernel, name):
    spec = load_spec(kernel)
    rows = shapes.load(name).rows
    of_weights = "N" in next(spec.problems({"M": 16, "K": 16, "N": 16, "E": 1})) or kernel == "rowwise-factored"
    if of_weights and not any("N" in row for row in rows):
        pytest.skip("the set holds activations alone")
    for routing in ROUTINGS:
        problems = plan.problems(spec, rows, Settings(routing=routing))
        assert len(set(problems)) == len(problems)
    for problem in problems:
        assert set(spec.lookup_key(problem)) == set(spec.key)
        assert spec.bytes_moved(problem.shape) > 0


def test_colwise_is_planned_on_the_activations_that_4069_timed():
    problems = plan.problems(load_spec("colwise"), shapes.load("deepseek-moe-16b").rows)
    shapes_planned = {problem.shape for problem in problems}
    assert shapes_planned >= {NamedInts(M=16640, K=k, G=groups) for k in (5120, 2048) for groups in (64, 128)}


def test_an_axis_of_the_arch_joins_the_grid_only_where_it_is_named():
    axes = {"BLOCK_SIZE": (32, 64), "num_warps": (4,)}
    assert grids.parse_grid([], axes, ["waves_per_eu"]) == axes
    assert grids.parse_grid(["waves_per_eu=2,4"], axes, ["waves_per_eu"]) == axes | {"waves_per_eu": (2, 4)}
    with pytest.raises(UsageError, match="waves_per_eu"):
        grids.parse_grid(["waves_per_eu=2"], axes)
