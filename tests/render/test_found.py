"""How a sweep ends: picks that changed, were kept and are open, by how much, and the commands that come next."""

from __future__ import annotations

import pytest
from database_rows import studies_of, study_of

from fp8tune import lookups
from fp8tune.records import Device, FinalsRun, KernelVersion, Kind, NamedInts, Problem, ProcessTimes, Status
from fp8tune.render.found import Change, change, found_lines, next_lines, stopped_line
from fp8tune.stats.study import Study
from fp8tune_kernels.tables import Table

DEVICE = Device(arch="sm_90", name="NVIDIA H100")
DEFAULT, OTHER = NamedInts(num_warps=4, num_stages=2), NamedInts(num_warps=8, num_stages=2)
VERSION = KernelVersion("colwise", "0123", DEFAULT, (("num_warps", (4, 8)), ("num_stages", (2,))))
RUN = FinalsRun("sweep", 0.01, 0.015)


def timed(number: int, default_us: float, other_us: float, spread: float = 0.001) -> Study:
    """A problem whose two configs six processes timed; every second process is so much slower for the other."""

    def entry(config: NamedInts, time_us: float, spread: float) -> Study:
        values = [time_us * (1 + spread * (n % 2)) for n in range(6)]
        finals = tuple(ProcessTimes(RUN, f"final {n:02d}", ((0, value),)) for n, value in enumerate(values))
        return study_of(
            Problem("colwise", NamedInts(M=number)),
            config,
            DEVICE,
            Kind.MEASURED,
            Status.OK,
            version=VERSION,
            lookup_key=NamedInts(M=number),
            finals=finals,
        )

    (study,) = studies_of([entry(DEFAULT, default_us, 0.0), entry(OTHER, other_us, spread)])
    return study


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "table", lambda arch: Table())


@pytest.fixture
def three() -> tuple[Study, Study, Study]:
    """Changed, kept and open."""
    return timed(1, 10.0, 8.0), timed(2, 8.0, 10.0), timed(3, 10.0, 9.6, 0.3)


def test_what_was_found_is_counted_and_named(three: tuple[Study, Study, Study]) -> None:
    changed, kept, is_open = three
    assert [change(each) for each in three] == [Change.CHANGED, Change.KEPT, Change.OPEN]
    first, *rest = found_lines([kept, changed, is_open])
    assert first.startswith("3 picks: 1 changed, 1 kept, 1 open (today: the kernel's default)")
    assert rest[0] == "  changed: colwise M=1: 8.00 us, -20.0 %: num_warps 4 -> 8"
    assert rest[1].startswith("  kept: colwise M=2: 8.00 us, next best +25.")
    assert rest[2].startswith("  open: colwise M=3: ")
    assert " % slower than another: " in rest[2]


def test_a_gain_is_over_the_config_that_a_lookup_would_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was over the kernel's default: -75.4 % where the real gain was a few percent."""
    fallback = ("colwise", "", None, tuple(OTHER.items()))
    monkeypatch.setattr(lookups, "table", lambda arch: Table((fallback,)))
    first, line = found_lines([timed(1, 8.0, 8.4)])
    assert first.endswith("(today: the shipped table's)")
    assert line == "  changed: colwise M=1: 8.00 us, -4.8 %: num_warps 8 -> 4"


def test_many_of_a_kind_are_counted() -> None:
    assert list(found_lines([timed(number, 8.0, 10.0) for number in range(7)]))[-1] == "  kept: 3 more"


def test_the_next_commands_can_be_typed_as_they_are(three: tuple[Study, Study, Study]) -> None:
    changed, kept, is_open = three
    command = "fp8tune sweep --kernel colwise --shapes llama4"

    def lines(found: list[Study], kind: Kind = Kind.MEASURED, db: str | None = None) -> list[str]:
        return list(next_lines(found, kind, DEVICE, command, db))

    assert lines([changed]) == ["next: fp8tune export --arch sm_90"]
    assert lines([kept, is_open], db="a b.db") == [
        "next: fp8tune export --arch sm_90 --db 'a b.db'",
        f"the open ones: {command} --again",
    ]
    assert lines([], Kind.INTERPRETER) == ["next: the same command on a machine with a GPU, which times what is right"]
    assert lines([], Kind.STATIC) == ["next: fp8tune show --failed --arch sm_90"]
    assert lines([changed], Kind.SIMULATED)[0].startswith("next: fp8tune show --kernel colwise (")


def test_who_is_stopped_hears_how_to_go_on() -> None:
    assert stopped_line(1, "screening", "x.db", "fp8tune sweep") == (
        "1 trial of this run is stored in x.db, the last while screening; go on with: fp8tune sweep"
    )
