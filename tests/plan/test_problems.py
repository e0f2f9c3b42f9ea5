"""Problem sizes and configs of a kernel that is never run."""

import itertools
import sys
from dataclasses import fields, replace
from random import Random

import pytest
from any_text import CHARACTERS, any_text
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


def heads(row):
    yield NamedInts(rows=row["rows"], cols=row["cols"])
    yield NamedInts(rows=row["rows"], cols=row["heads"])


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


def test_a_grid_narrows_and_widens_only_the_axes_it_names():
    parsed = grids.parse_grid(["num_warps=16", " BLOCK_SIZE = 512 , 32,512 ", "waves_per_eu=2,0,2"], AXES)
    expected = AXES | {"num_warps": (16,), "BLOCK_SIZE": (512, 32), "waves_per_eu": (2, 0)}
    assert list(parsed.items()) == list(expected.items())
    amd = grids.parse_grid(["waves_per_eu=2,4"], {"num_warps": (4,)}, ["waves_per_eu"])
    assert amd == {"num_warps": (4,), "waves_per_eu": (2, 4)}
    with pytest.raises(UsageError, match="waves_per_eu"):
        grids.parse_grid(["waves_per_eu=2"], {"num_warps": (4,)})
    declared = {"BLOCK_SIZE": (48, 64), "maxnreg": (0, 64)}  # what a kernel declares is not second-guessed
    assert grids.parse_grid(["BLOCK_SIZE=48", "maxnreg=0"], declared) == {"BLOCK_SIZE": (48,), "maxnreg": (0,)}


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["num_warps"], "is not of the form"),
        (["num_warps="], "is not of the form"),
        (["num_warp=4"], "did you mean num_warps"),
        (["num_warps=4", "num_warps=8"], "twice"),
        (["num_warps=6"], "powers of two, not 6"),
        (["BLOCK_SIZE=48"], "powers of two, not 48"),
        *(([f"num_stages={text}"], "integers from 1") for text in ("0", "4,,5", "-1", "1_0", "٣", "9" * 5000)),
    ],
)
def test_a_grid_that_triton_cannot_take_is_refused(texts, complaint):
    with pytest.raises(UsageError, match=complaint):
        grids.parse_grid(texts, AXES)


@given(
    st.lists(
        st.one_of(
            any_text(max_size=20), st.from_regex(r"(num_warps|BLOCK_SIZE|UNROLL)=[0-9,]{0,9}", alphabet=CHARACTERS)
        )
    )
)
def test_any_grid_gives_the_same_axes_or_a_one_line_error(texts):
    try:
        grid = grids.parse_grid(texts, AXES)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert list(grid) == list(AXES)
        assert all(values and len(set(values)) == len(values) for values in grid.values())


def test_problems_come_in_order_once_each_for_every_layout_and_dtype():
    spec = replace(SPEC, input_layouts=("contiguous", "transposed"))
    swapped = NamedInts(M=64, K=48, N=32, E=4)
    settings = Settings(routing="zipf", scale="exact", seed=7)
    assert plan.problems(spec, [ROW, swapped, ROW], settings, arch="gfx942") == [
        Problem("planned", NamedInts(M=64, K=k, G=4), "zipf", layout, "bfloat16", "float8_e4m3fnuz", "exact", 7)
        for k in (32, 48)
        for layout in ("contiguous", "transposed")
    ]
    spec = replace(SPEC, in_dtypes=("float16", "float32"), key=("K", "in_dtype"))
    both = plan.problems(spec, [NamedInts(M=64, K=32, N=32, E=4)])
    assert [(problem.in_dtype, spec.lookup_key(problem)["in_dtype"]) for problem in both] == [
        ("float16", 1),
        ("float32", 2),
    ]


def test_a_kernel_ignores_settings_of_what_it_lacks():
    assert {problem.routing for problem in plan.problems(replace(SPEC, routed=False), [ROW])} == {"none"}
    (problem, _) = plan.problems(replace(SPEC, uses_fp8=False, scale_modes=()), [ROW], Settings(scale="exact"))
    assert (problem.fp8_dtype, problem.scale_mode) == ("", "")
    recorded = (Problem("a:b", NamedInts(n=3), "none", "recorded-0123456789ab", "int32", "", ""),)
    assert plan.problems(replace(SPEC, recorded=recorded), [ROW]) == list(recorded)
    mx = replace(SPEC, scale_modes=("floor", "rceil"))
    assert {problem.scale_mode for problem in plan.problems(mx, [ROW])} == {"floor"}
    with pytest.raises(UsageError, match="known: floor, rceil"):
        plan.problems(mx, [ROW], Settings(scale="exact"))


@pytest.mark.parametrize(("arch", "own"), [("sm_90", "float8_e4m3fn"), ("gfx942", "float8_e4m3fnuz")])
def test_fp8_formats_of_other_arches_are_left_out_unless_named(arch, own):
    spec = replace(SPEC, in_dtypes=("float8_e4m3fn", "float8_e4m3fnuz", "bfloat16"))
    dtypes = [problem.in_dtype for problem in plan.problems(spec, [ROW], arch=arch)]
    assert [*dict.fromkeys(dtypes)] == [own, "bfloat16"]
    named, _ = plan.problems(spec, [ROW], Settings(dtype="float8_e4m3fnuz"), arch="sm_90")
    assert named.in_dtype == "float8_e4m3fnuz"


def test_a_row_holds_the_problems_whose_dims_it_has():
    assert [problem.shape for problem in plan.problems(SPEC, [NamedInts(M=64, K=32, E=4)])] == [PROBLEM.shape]
    spec = replace(SPEC, problems=heads, key=("cols",), bytes_moved=lambda shape: 4 * shape["rows"] * shape["cols"])
    rows = [NamedInts(rows=8, cols=9, heads=2), NamedInts(rows=3, cols=4), NamedInts(M=3)]
    expected = ["rows=8 cols=9", "rows=8 cols=2", "rows=3 cols=4"]
    assert [str(problem.shape) for problem in plan.problems(spec, rows)] == expected
    with pytest.raises(UsageError, match="its problems ask for rows, and the shapes have M, K, N, E, heads"):
        plan.problems(spec, [ROW, NamedInts(heads=3)])


def raises_key_error(row):
    raise KeyError("N")
    yield


@pytest.mark.parametrize(
    ("problems", "complaint"),
    [
        (raises_key_error, r"test_problems.py:\d+: problems of planned raised KeyError: 'N'"),
        (lambda row: iter([1 / 0]), r"test_problems.py:\d+: problems of planned raised ZeroDivisionError"),
        (lambda row: None, "problems of planned raised TypeError"),
        (lambda row: sys.exit(3), "problems of planned raised SystemExit: 3"),
        (lambda row: iter([dict(row)]), "yield NamedInts"),
        (lambda row: iter([NamedInts(M=-1)]), "yield NamedInts"),
        (lambda row: iter([NamedInts({"lambda": 1})]), "lambda"),
        (lambda row: iter([NamedInts(M=2**63)]), "yield NamedInts"),
    ],
)
def test_problems_that_fail_are_one_line(problems, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        plan.problems(replace(SPEC, problems=problems), [ROW])
    assert len(str(caught.value).splitlines()) == 1


def test_configs_are_the_default_which_is_never_pruned_and_then_the_product_in_declaration_order():
    grid = grids.configs(SPEC, PROBLEM, AXES, LIMITS)
    default, *others = grid
    assert default == SPEC.default
    assert [tuple(config.values()) for config in others] == list(itertools.product(*AXES.values()))
    assert all(list(config) == list(AXES) for config in grid)
    assert all(pruned == "too many warps" * (config["num_warps"] == 8) for config, pruned in grid.items())
    first, *rest = grids.configs(replace(SPEC, invalid=lambda *_: "never"), PROBLEM, AXES, LIMITS).values()
    assert (first, {*rest}) == ("", {"never"})
    with_default = grids.configs(SPEC, PROBLEM, grids.parse_grid(["BLOCK_SIZE=128,32"], AXES), None)
    assert len(with_default) == 2 * 2 * 2 * 3 * 2, "a default in the grid is tried once"


def test_a_listed_grid_is_narrowed_and_widened():
    spec = load_spec("grouped-rows")
    problem = Problem("grouped-rows", NamedInts(M=16640, N=8192, K=5120, G=16), "jagged", in_dtype="bfloat16")

    def grid(*texts):
        return {*[*grids.configs(spec, problem, grids.parse_grid(texts, spec.axes), None)][1:]}

    assert grid() == {*spec.configs} - {spec.default}
    assert {config["num_warps"] for config in grid("num_warps=4")} == {4}
    assert grid("num_warps=4") < {*spec.configs}
    assert {config["num_stages"] for config in grid("num_stages=4,6")} == {4, 6}


def test_the_interpreter_tries_each_set_of_block_sizes_once_on_each_scaled_down_problem():
    problems = plan.scaled_down(SPEC, plan.problems(SPEC, [ROW, NamedInts(M=64, K=4, N=32, E=2)]))
    assert list(dict.fromkeys(problem.shape["K"] for problem in problems)) == [8, 4]
    for configs in (grids.interpreter_configs(SPEC, problem, AXES) for problem in problems):
        blocks = [(config["BLOCK_SIZE"], config["UNROLL"]) for config in configs]
        assert blocks == [(128, 1), (32, 1), (32, 3), (64, 1), (64, 3)]
        assert all(config[name] == SPEC.default[name] for config in configs for name in LAUNCH_OPTIONS & config.keys())
    sizes = NamedInts(b=64, h=64, M=64, d=64)
    small = replace(SPEC, scaled_down=None).scaled_down(replace(PROBLEM, shape=sizes))
    assert small.shape == NamedInts(b=37, h=37, M=64, d=37)


def test_every_kernel_has_problems_in_every_set_for_every_routing():
    for kernel, name in itertools.product(catalog.KERNELS, shapes.list_sets()):
        spec, rows = load_spec(kernel), shapes.load(name).rows
        try:
            problems = plan.problems(spec, rows)
        except UsageError:
            assert not any("N" in row for row in rows), "only a set of activations alone may lack what a kernel needs"
            continue
        for routing in ROUTINGS:
            routed = plan.problems(spec, rows, Settings(routing=routing))
            assert len(set(routed)) == len(routed)
        for problem in problems:
            assert set(spec.lookup_key(problem)) == set(spec.key), (kernel, name)
            assert spec.bytes_moved(problem.shape) > 0, (kernel, name)


def test_a_problem_in_a_seed_is_the_text_that_sweeps_began_with():
    """Were it another, every permutation and every simulated time of every stored sweep would change."""
    problem = Problem("colwise", NamedInts(M=16640, K=5120, G=8), "jagged", seed=3)
    shuffled = list(range(8))
    Random(f"0 final 0 0 {plan.seed_text(problem)}").shuffle(shuffled)
    assert shuffled == [6, 5, 1, 2, 0, 3, 7, 4]
    assert {field.name for field in fields(Problem)} == {
        "kernel", "shape", "routing", "input_layout", "in_dtype", "fp8_dtype", "scale_mode", "seed",
    }, "a new field enters seed_text only where it has another value than its default"  # fmt: skip
