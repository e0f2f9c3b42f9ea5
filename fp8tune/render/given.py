"""What ``export --for`` prints: the files, and the markdown of a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fp8tune.export.given import Given, Tuned
from fp8tune.records import NamedInts
from fp8tune.render.contracts import Object
from fp8tune.render.report import Column, Report, left, markdown_text, right
from fp8tune.render.terminal import microseconds, slower
from fp8tune.replay.recording import Config

if TYPE_CHECKING:
    from fp8tune.choose.covering import Covering
    from fp8tune.export.files import Placed
    from fp8tune.export.formats.diff import Shrunk


def summary(
    givens: Sequence[Given], name: str, files: Sequence[Placed], state: str, next: str, shrunk: Shrunk | None
) -> Object:
    """``export --for --json``. ``state`` of a file: written, would be written, stale, or unchanged; times in us."""
    found: dict[str, object] = {
        "format": name,
        "kernel": givens[0].kernel,
        "arch": givens[0].device.arch,
        "devices": [given.device.name for given in givens],
        "problems": [
            {
                "device": given.device.name,
                "shape": dict(one.problem.shape),
                "config": dict(one.config),
                "time_us": one.time_us,
                "verdict": one.verdict,
                "check": one.check,
                "evidence": one.evidence,
            }
            for given in givens
            for one in given.tuned
        ],
        "files": [{"path": str(file.path), "state": state if file.is_stale else "unchanged"} for file in files],
        "notices": [line for given in givens for line in given.notices],
        "next": next,
    }
    if shrunk is not None:
        found["covering"] = {
            **_covering(shrunk.covering),
            "before": shrunk.before,
            "others": [_covering(other) for other in shrunk.others],
            "wrong": [{"config": dict(config), "problems": len(where)} for config, where in shrunk.wrong.items()],
        }
    return found


def _covering(found: Covering) -> Object:
    configs = [dict(config) for config in found.configs]
    return {
        "within": found.within,
        "configs": configs,
        "is_smallest": found.is_smallest,
        "worst_loss": found.worst,
        "mean_loss": found.mean,
    }


def markdown(shrunk: Shrunk) -> str:
    """What a pull request says of the diff: configs before and after, each key's loss, wrong configs, time saved."""
    return "\n".join(_lines(shrunk)) + "\n"


def _lines(shrunk: Shrunk) -> Iterator[str]:
    given, covering, kernel = shrunk.given, shrunk.covering, shrunk.given.recorded
    assert kernel is not None  # a kernel without configs is refused before
    device, count = given.device, len(covering.configs)
    where = f"{device.name or device.arch}, driver {device.driver or 'unknown'}, Triton {device.triton or 'unknown'}"
    yield f"### `{markdown_text(given.kernel)}`: {shrunk.headline}"
    yield ""
    yield (
        f"Each of the {len(shrunk.tuned)} recorded problems has a config within {100 * covering.within:g} % of its "
        f"best time; the mean loss is {100 * covering.mean:.1f} %. Measured on {markdown_text(where)}."
    )
    if kernel.tuning_s:
        left_s = kernel.tuning_s * count / shrunk.before if count > 1 else 0.0
        yield (
            f"Run-time tuning took {kernel.tuning_s:.1f} s in the recorded run, over all keys and processes. "
            + (
                f"With {count} configs it takes about {left_s:.1f} s."
                if count > 1
                else "With one config there is none."
            )
        )
    yield ""
    yield _per_key(shrunk).markdown()
    yield ""
    bounds: list[Column[Covering]] = [
        left("at most slower", lambda each: f"{100 * each.within:g} %"),
        right("configs", lambda each: f"{len(each.configs)}{'' if each.is_smallest else ' or fewer'}"),
        right("worst loss", lambda each: f"{100 * each.worst:.1f} %"),
        right("mean loss", lambda each: f"{100 * each.mean:.1f} %"),
    ]
    yield Report("", bounds, shrunk.others).markdown()
    if shrunk.wrong:
        yield ""
        yield "Configs whose output disagreed with what is right, in no list above:"
        yield ""
        for config, problems in shrunk.wrong.items():
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            yield f"- `{markdown_text(described(given.configs[config]))}` at {problems[0].shape}{more}"
    if covering.incomplete:
        yield ""
        for number, missing in sorted(covering.incomplete.items()):
            yield f"- {shrunk.tuned[number].problem.shape}: {missing} configs have no time, which may be faster"
    if notes := (*given.notices, *shrunk.notes):
        yield ""
        yield from (f"- {markdown_text(note)}" for note in notes)


def _per_key(shrunk: Shrunk) -> Report[tuple[Tuned, NamedInts]]:
    configs = shrunk.given.configs

    def picked_at_run_time(one: Tuned) -> str:
        """What run-time tuning took in the recorded run, against the best."""
        picked = one.launch.config if one.launch else None
        same = [loss for config, loss in one.slowdowns.items() if picked and _is_same(configs[config], picked)]
        return slower(same[0]) if same else ""

    columns: list[Column[tuple[Tuned, NamedInts]]] = [
        left("problem", lambda row: _problem(row[0], shrunk.tuned)),
        left("best", lambda row: described(configs[_best(row[0])])),
        right("us", lambda row: microseconds(row[0].times_us[_best(row[0])])),
        left("chosen", lambda row: described(configs[row[1]])),
        right("loss", lambda row: slower(row[0].slowdowns[row[1]])),
        right("run-time tuning's pick", lambda row: picked_at_run_time(row[0])),
        left("evidence", lambda row: f"{row[0].evidence}; {row[0].check}"),
    ]
    return Report("", columns, list(zip(shrunk.tuned, shrunk.covering.chosen, strict=True)))


def _problem(one: Tuned, among: Sequence[Tuned]) -> str:
    """Shape and dtype; the layout too, which says which launch it is, where another problem has the same."""

    def said(each: Tuned) -> str:
        return f"{each.problem.shape} {each.problem.in_dtype}"

    is_alone = sum(said(each) == said(one) for each in among) == 1
    return said(one) if is_alone else f"{said(one)} {one.problem.input_layout}"


def _best(one: Tuned) -> NamedInts:
    """The fastest; of equals the pick, for another may only have been screened."""
    return min(one.slowdowns, key=lambda config: (one.slowdowns[config], config != one.config, config.canonical))


def _is_same(config: Config, other: Config) -> bool:
    return (dict(config.kwargs), config.options) == (dict(other.kwargs), other.options)


def described(config: Config) -> str:
    """``BLOCK=128 num_warps=4 num_stages=3``."""
    return " ".join(f"{name}={value}" for name, value in {**config.kwargs, **config.options}.items())
