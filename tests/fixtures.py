"""Fixtures and settings for all tests. Kernels run on the GPU if there is one, else on Triton's interpreter."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # each core has a worker: threads beyond that wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # and starts no processes that import torch again

import torch  # after the variable, which it reads
from filelock import FileLock
from hypothesis import settings
from servers import Server, lacking, running

from fp8tune import interpreter
from fp8tune.store.results import Store

# A busy machine, or a first import inside a test, is no failure. The same 40 examples each time: what fails in CI fails
# anywhere. New ones are looked for by `pytest --hypothesis-profile thorough`.
settings.register_profile("fp8tune", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("fp8tune")

# A shell lets what it starts in the background ignore Ctrl-C, and so do all processes that tests start and stop.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As the program does it: at Python's own threshold, a tenth of the time of collecting and of short tests goes into it.
gc.set_threshold(100_000)

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers, and a pipe would be cut to it
os.environ["FP8TUNE_TABLES"] = ""  # lookups read no table of whoever runs the tests
os.environ["FP8TUNE_DB"] = "fp8tune.db"  # of the test's folder, not of whoever runs the tests
os.environ["FP8TUNE_BASE"] = ""  # and no rows below it

# Triton reads it when it is imported and when a kernel is decorated. On a GPU tests are of compiled kernels, whatever
# the environment says.
if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.install()


gc.freeze()  # what is imported stays: no collection looks at it again, nor the two at the end, of half a second each


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """One worker after the other where .ci/run begins without bytecode: the second finds what the first compiled."""
    with contextlib.ExitStack() as alone:
        if "PYTEST_XDIST_WORKER" in os.environ and sys.pycache_prefix:
            Path(sys.pycache_prefix).mkdir(parents=True, exist_ok=True)
            alone.enter_context(FileLock(Path(sys.pycache_prefix) / "collecting"))
        return (yield)


def pytest_collection_finish() -> None:
    """Exclude the imports of the collection from garbage collection too."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.nodeid.partition("::")[0] for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in slow)  # at the end a worker would wait for one
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """The torch device kernels run on in this session."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def once_a_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], str]], str]:
    """Gives what a slow function returns; the first of several worker processes that asks for a name calls it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def made(name: str, make: Callable[[], str]) -> str:
        file = folder / f"{name}.txt"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(make())
        return file.read_text()

    return made


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A PostgreSQL server of this process's tests. Who kills it starts it again."""
    if reason := lacking():
        pytest.skip(reason)
    with running() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: Server) -> str:
    """An empty database on it."""
    return postgresql.database()


@pytest.fixture(scope="session")
def made_database(postgresql: Server) -> str:
    """The URL of a database with tables, which tests take one after another and leave without rows."""
    url = postgresql.database()
    Store.open(url, create=True).close()
    return url


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without rows: a file's path, and with :data:`servers.on_both` a URL of a server's too."""
    yield from _without_rows(request, getattr(request, "param", "sqlite"), tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def each_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Empty database of each kind, for every test that requests it."""
    yield from _without_rows(request, request.param, tmp_path)


def _without_rows(request: pytest.FixtureRequest, kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield str(folder / "results.db")
        return
    server, url = request.getfixturevalue("postgresql"), request.getfixturevalue("made_database")
    yield url
    server.empty(url)


@pytest.fixture(autouse=True)
def same_import_path() -> Iterator[None]:
    """Restore ``sys.path``: loading a kernel adds its folder, where another test's kernel may have the same name."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture
def quantizers_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, quantize in plain torch, to the same bytes: Triton's interpreter takes ten seconds a step."""
    from fp8tune_kernels import interpreter

    monkeypatch.setattr(interpreter, "INTERPRETED", False)
