"""Shape sets, and ``--shapes SET[,NAME=VALUE...]``: which sizes are kept, and which settings they get."""

import itertools
import keyword
from pathlib import Path

import pytest
from any_text import CHARACTERS, any_text
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.options import SweepOptions
from fp8tune.plan import shapes
from fp8tune.plan.problems import problems
from fp8tune.plan.shapes import Settings
from fp8tune.records import NamedInts
from fp8tune.replay.loading import load_spec
from fp8tune.sweeping.planning import planned
from fp8tune_kernels.catalog import KERNELS

SWEPT = ("llama4", "deepseek-v3", "deepseek-moe-16b", "starting-line", "rows")
SIZE = st.integers(1, shapes.LARGEST_DIM)
SIZES = st.one_of(SIZE, st.lists(SIZE, min_size=1, max_size=3))
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True, alphabet=CHARACTERS)
DIM = st.one_of(st.sampled_from(shapes.DIMS), NAMES.filter(lambda dim: not keyword.iskeyword(dim) and dim != "name"))
ENTRY = st.dictionaries(DIM, SIZES, min_size=1, max_size=5)


def as_toml(entries):
    return "".join("[[rows]]\n" + "".join(f"{dim} = {value}\n" for dim, value in entry.items()) for entry in entries)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shapes")


def load_text(folder: Path, text: str | bytes) -> shapes.Selection:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    return shapes.load(str(path))


def test_the_sets_hold_what_they_promise():
    names = "bench-models deepseek-moe-16b deepseek-v3 grouped-mm llama4 models moe-layer-down moe-layer-up rows"
    assert shapes.list_sets() == (*names.split(), "starting-line", "tiny", "unseen")
    rows = {name: shapes.load(name).rows for name in shapes.list_sets()}
    assert all(len(set(rows)) == len(rows) for rows in rows.values())
    both = [(5120, 8192), (8192, 5120)]  # w1 and w3, and w2
    sizes = [(16640, experts) for experts in (1, 4, 16, 64, 128)] + [(131072, 8)]
    assert {*rows["llama4"]} == {NamedInts(M=m, K=k, N=n, E=e) for k, n in both for m, e in sizes}
    assert all(row["E"] > 1 and all(size % 64 and size < 256 for size in row.values()) for row in rows["tiny"])


def test_a_name_is_no_dim_and_names_all_rows_of_its_entry(folder):
    selection = load_text(folder, '[[rows]]\nname = "Mine, up"\nM = [3, 5]\nK = 4\nE = 1\n[[rows]]\nM = 7\n')
    first, second, unnamed = selection.rows
    assert (first, unnamed) == (NamedInts(M=3, K=4, E=1), NamedInts(M=7))
    assert selection.names == {first: "Mine, up", second: "Mine, up"}
    assert load_text(folder, "rows = [{M = 3, K = 4, E = 1}]") == shapes.Selection((NamedInts(M=3, K=4, E=1),))


@given(st.lists(ENTRY, min_size=1, max_size=4))
def test_an_entry_multiplies_out_in_order(folder, entries):
    rows = []
    for entry in entries:
        dims = sorted(entry, key=lambda dim: shapes.DIMS.index(dim) if dim in shapes.DIMS else len(shapes.DIMS))
        lists = [entry[dim] if isinstance(entry[dim], list) else [entry[dim]] for dim in dims]
        rows += [tuple(zip(dims, sizes, strict=True)) for sizes in itertools.product(*lists)]
    assert [tuple(row.items()) for row in load_text(folder, as_toml(entries)).rows] == rows


@given(st.one_of(st.binary(max_size=80), any_text(max_size=80)))
def test_any_bytes_are_a_set_or_a_one_line_error(folder, text):
    try:
        assert load_text(folder, text).rows
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"no \[\[rows\]\]"),
        ("rows = 3", r"no \[\[rows\]\]"),
        ("rows = [3]", "entry 1: .*not int"),
        ("row = 1", "'row'"),
        ("[[rows]]\nM = many", "line 2"),
        (b"\xff", "utf-8"),
        ("[" * 1900, "TOML"),
        ("[[rows]]\nM=1\n[[rows]]", "entry 2: is empty"),
        ('[[rows]]\nname="no dims"', "entry 1: is empty"),
        *((f"[[rows]]\n{dim}=1", f"entry 1: the dim '{dim}' is refused") for dim in ("seq-len", "lambda")),
        *((f"[[rows]]\nM=1\nK={size}", "entry 1: K must be") for size in ("true", '[1, "2"]', "[]", "0", "2147483648")),
        *((f"[[rows]]\nM=1\nname={name}", "entry 1: name must be") for name in ("3", '"a\\nb"')),
        (as_toml([{dim: list(range(1, 12)) for dim in "MKNE"}]), "14641 rows"),
    ],
)
def test_an_error_names_the_file_the_entry_and_what_is_wrong(folder, text, complaint):
    with pytest.raises(UsageError, match=f"shape file '.*mine.toml'.*{complaint}"):
        load_text(folder, text)


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("lama4", "did you mean llama4"),
        *((path, "cannot read shape file") for path in ("missing.toml", "../llama4", "/")),
    ]
    + [(name, "unknown shape set") for name in ("..", "", "published", "llama4\n")],
)
def test_a_set_that_is_not_there_is_refused(reference, complaint):
    with pytest.raises(UsageError, match=complaint):
        shapes.load(reference)


def test_sizes_filter_and_settings_apply(tmp_path: Path) -> None:
    spec, selected = load_spec("colwise"), shapes.parse("llama4,K=5120,G=16,routing=zipf,dtype=bfloat16,seed=3")
    assert selected.settings == Settings(routing="zipf", dtype="bfloat16", seed=3)
    sizes = problems(spec, selected.rows, selected.settings, size=selected.size)
    assert {(problem.shape["K"], problem.shape["G"], problem.routing) for problem in sizes} == {(5120, 16, "zipf")}
    selected = shapes.parse("llama4,E=8")  # a dim that the kernel lacks is looked up in the row
    assert {size.shape["M"] for size in problems(spec, selected.rows, size=selected.size)} == {131072}
    with pytest.raises(UsageError, match="K=77"):
        problems(spec, selected.rows, size=NamedInts(K=77))
    path = tmp_path / "mine.toml"
    path.write_text('routing = "empty"\nseed = 7\n[[rows]]\nM = [64, 128]\nK = 96\nN = 32\nE = 2\n')
    assert shapes.parse(f"{path},M=64").settings == Settings(routing="empty", seed=7)
    assert shapes.parse(f"{path},routing=zipf").settings == Settings(routing="zipf", seed=7)
    with pytest.raises(UsageError, match="one command for each"):
        planned(SweepOptions(shapes=("tiny,routing=zipf", "llama4")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("K=5120", "names no shape set"),
        ("llama4,routing=jaged", "did you mean jagged"),
        ("llama4,rooting=jagged", "did you mean routing"),
        ("llama4,dtype=bf16", "dtype"),
        *((f"llama4,seed={seed}", "seed") for seed in ("-1", 2**64, "9" * 9999)),
        ("llama4,K", "NAME=VALUE"),
        ("llama4,", "NAME=VALUE"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shapes.parse(text)


def test_no_unseen_size_has_the_key_of_a_swept_one():
    for kernel in KERNELS:
        spec = load_spec(kernel)
        swept = problems(spec, [row for name in SWEPT for row in shapes.load(name).rows])
        unseen = problems(spec, shapes.load("unseen").rows)
        assert len({size.shape for size in unseen}) >= 10
        if kernel != "expert-sort":  # its key has rows and experts alone, and other models have as many
            assert not {*map(spec.lookup_key, unseen)} & {*map(spec.lookup_key, swept)}
