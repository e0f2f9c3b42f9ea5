import itertools
import keyword
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8tune.errors import UsageError
from fp8tune.plan import shapes
from fp8tune.records import NamedInts

SIZE = st.integers(1, shapes.LARGEST_DIM)
SIZES = st.one_of(SIZE, st.lists(SIZE, min_size=1, max_size=3))
DIM = st.one_of(
    st.sampled_from(shapes.DIMS),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True).filter(
        lambda dim: not keyword.iskeyword(dim) and dim != shapes.NAME_KEY
    ),
)
ENTRY = st.dictionaries(DIM, SIZES, min_size=1, max_size=5)


def as_toml(entries):
    return "".join("[[rows]]\n" + "".join(f"{dim} = {value}\n" for dim, value in entry.items()) for entry in entries)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shapes")


def load_text(folder: Path, text: str | bytes) -> shapes.Selection:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return shapes.load(str(path))


def rows_of(name):
    return {tuple(row.items()) for row in shapes.load(name).rows}


def expected(weights, sizes):
    """Rows of both weights, w1/w3 (K, N) and w2 (N, K), each at all of ``sizes`` (M, E)."""
    return {
        (("M", m), ("K", k), ("N", n), ("E", e))
        for k, n in (weights, weights[::-1])
        for m, experts in sizes
        for e in experts
    }


def test_the_sets_hold_what_they_promise():
    assert shapes.list_sets() == (
        "bench-models",
        "deepseek-moe-16b",
        "deepseek-v3",
        "grouped-mm",
        "llama4",
        "models",
        "moe-layer-down",
        "moe-layer-up",
        "rows",
        "starting-line",
        "tiny",
        "unseen",
    )
    assert rows_of("llama4") == expected((5120, 8192), [(16640, (1, 4, 16, 64, 128)), (131072, (8,))])
    assert rows_of("deepseek-v3") == expected((7168, 2048), [(16640, (4, 8, 32)), (131072, (8,))])
    rows = {(("M", m), ("K", k), ("E", 8)) for m in (4096, 65536) for k in (768, 1024, 10752, 12288, 14336, 16384)}
    assert rows_of("rows") == rows
    activations = {(("M", 16640), ("K", 5120), ("E", experts)) for experts in (64, 128)}
    assert rows_of("deepseek-moe-16b") == activations | expected((2048, 1408), [(16640, (64, 128)), (65536, (64,))])


def test_a_name_is_no_dim_and_names_all_rows_of_its_entry(folder):
    text = '[[rows]]\nname = "Mine, up"\nM = [3, 5]\nK = 4\nE = 1\n[[rows]]\nM = 7\n'
    found = load_text(folder, text)
    first, second, unnamed = found.rows
    assert (first, unnamed) == (NamedInts(M=3, K=4, E=1), NamedInts(M=7))
    assert found.names == {first: "Mine, up", second: "Mine, up"}


@pytest.mark.parametrize("name", shapes.list_sets())
def test_no_set_repeats_a_row(name):
    rows = shapes.load(name).rows
    assert len(set(rows)) == len(rows)


def test_tiny_is_small_has_groups_and_dims_that_no_block_divides():
    for row in shapes.load("tiny").rows:
        assert row["E"] > 1
        assert all(size % 64 and size < 256 for size in row.values())


def test_rows_may_be_an_inline_list(folder):
    (folder / "ours.toml").write_text("rows = [{M = 3, K = 4, E = 1}]")
    assert shapes.load(str(folder / "ours.toml")) == shapes.Selection((NamedInts(M=3, K=4, E=1),))


@given(st.lists(ENTRY, min_size=1, max_size=4))
def test_an_entry_multiplies_out_in_order(folder, entries):
    wanted = []
    for entry in entries:
        dims = sorted(entry, key=lambda dim: shapes.DIMS.index(dim) if dim in shapes.DIMS else len(shapes.DIMS))
        lists = [entry[dim] if isinstance(entry[dim], list) else [entry[dim]] for dim in dims]
        wanted += [tuple(zip(dims, sizes, strict=True)) for sizes in itertools.product(*lists)]
    assert [tuple(row.items()) for row in load_text(folder, as_toml(entries)).rows] == wanted


@given(st.one_of(st.binary(max_size=80), st.text(max_size=80)))
def test_any_bytes_are_a_set_or_a_one_line_error(folder, text):
    try:
        loaded = load_text(folder, text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert loaded.rows


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"has no \[\[rows\]\] entry: add one"),
        ("rows = 3", r"has no \[\[rows\]\] entry"),
        ("rows = [3]", r"entry 1: must be a \[\[rows\]\] table, not int"),
        ("row = 1", "unknown key 'row'"),
        ("[[rows]]\nM = many", "is not TOML: .*line 2"),
        (b"\xff", "is not TOML: .*utf-8"),
        ("[" * 1900, "is not TOML"),
        ("[[rows]]\nM=1\n[[rows]]", "entry 2: is empty"),
        ("[[rows]]\nseq-len=1", "entry 1: the dim 'seq-len' is refused: use a name that Python takes"),
        ("[[rows]]\nlambda=1", "entry 1: the dim 'lambda' is refused"),
        ("[[rows]]\nM=true\nK=1\nE=1", "entry 1: M must be an integer from 1"),
        ('[[rows]]\nM=1\nK=[1, "2"]\nE=1', "entry 1: K must be an integer from 1"),
        ("[[rows]]\nM=1\nK=[]\nE=1", "entry 1: K must be an integer from 1"),
        ("[[rows]]\nM=0\nK=1\nE=1", "entry 1: M must be an integer from 1 to 2147483647"),
        ("[[rows]]\nM=1\nK=1\nE=2147483648", "entry 1: E must be an integer from 1 to"),
        ('[[rows]]\nM=1\nname=""', "entry 1: name must be a text"),
        ("[[rows]]\nM=1\nname=3", "entry 1: name must be a text"),
        ('[[rows]]\nM=1\nname="a\\nb"', "entry 1: name must be a text of one line and at most 60 characters"),
        ('[[rows]]\nname="no dims"', "entry 1: is empty"),
        (as_toml([{dim: list(range(1, 12)) for dim in "MKNE"}]), "multiplies out to 14641 rows"),
    ],
)
def test_an_error_names_the_file_the_entry_and_what_is_wrong(folder, text, complaint):
    with pytest.raises(UsageError, match=f"shape file '.*mine.toml'.*{complaint}"):
        load_text(folder, text)


def test_an_unknown_name_gets_its_near_matches():
    with pytest.raises(UsageError, match="unknown shape set 'lama4': did you mean llama4"):
        shapes.load("lama4")


@pytest.mark.parametrize("reference", ["missing.toml", "../llama4", "/"])
def test_a_file_that_cannot_be_read_is_a_usage_error(reference):
    with pytest.raises(UsageError, match="cannot read shape file"):
        shapes.load(reference)


def test_a_name_cannot_leave_the_folder():
    for reference in ("..", "", "published", "llama4\n"):
        with pytest.raises(UsageError):
            shapes.load(reference)
