"""What ``export --for`` prints: the files, and the markdown of a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8tune.records import NamedInts
from fp8tune.render.contracts import Object
from fp8tune.render.report import Column, Report, left, markdown_text, right
from fp8tune.render.terminal import microseconds, slower
from fp8tune.replay.recording import Config
from fp8tune.stats.study import Verdict
from fp8tune.tables.picks import KernelPicks, Pick

if TYPE_CHECKING:
    from fp8tune.stats.shared import Cover
    from fp8tune.tables.formats.diff import Shrunk


def summary(
    kernels: Sequence[KernelPicks], name: str, files: Mapping[Path, str], next: str, shrunk: Shrunk | None
) -> Object:
    """``export --for --json``. Files have a state: written, would be written, stale, or unchanged; times in us."""
    document: dict[str, object] = {
        "format": name,
        "kernel": kernels[0].kernel,
        "arch": kernels[0].device.arch,
        "devices": [kernel.device.name for kernel in kernels],
        "problems": [
            {
                "device": kernel.device.name,
                "shape": dict(pick.problem.shape),
                "config": dict(pick.config),
                "time_us": pick.study.choice.time_us,
                "verdict": "" if pick.study.choice.verdict is Verdict.PUBLISHED else pick.study.choice.verdict,
                "check": pick.study.pick.check,
                "evidence": pick.evidence,
            }
            for kernel in kernels
            for pick in kernel.picks
        ],
        "files": [{"path": str(path), "state": state} for path, state in files.items()],
        "notices": [line for kernel in kernels for line in kernel.notices],
        "next": next,
    }
    if shrunk is not None:
        document["covering"] = {
            **_covering(shrunk.cover),
            "before": shrunk.before,
            "others": [_covering(other) for other in shrunk.others],
            "wrong": [{"config": dict(config), "problems": len(where)} for config, where in shrunk.wrong.items()],
        }
    return document


def _covering(found: Cover) -> Object:
    configs = [dict(config) for config in found.configs]
    return {
        "within": found.within,
        "configs": configs,
        "worst_loss": found.worst,
        "mean_loss": found.mean,
    }


def markdown(shrunk: Shrunk) -> str:
    """What a pull request says of the diff: configs before and after, each key's loss, wrong configs, time saved."""
    return "\n".join(_lines(shrunk)) + "\n"


def _lines(shrunk: Shrunk) -> Iterator[str]:
    given, covering, kernel = shrunk.kernel, shrunk.cover, shrunk.kernel.recorded
    assert kernel is not None  # a kernel without configs is refused before
    device, count = given.device, len(covering.configs)
    where = f"{device.name or device.arch}, driver {device.driver or 'unknown'}, Triton {device.triton or 'unknown'}"
    yield f"### `{markdown_text(given.kernel)}`: {shrunk.headline}"
    yield ""
    yield (
        f"Each of the {len(shrunk.picks)} recorded problems has a config within {100 * covering.within:g} % of its "
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
    bounds: list[Column[Cover]] = [
        left("at most slower", lambda each: f"{100 * each.within:g} %"),
        right("configs", lambda each: str(len(each.configs))),
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
            yield f"- `{markdown_text(described(given.triton_config(config)))}` at {problems[0].shape}{more}"
    if notes := (*given.notices, *shrunk.notes):
        yield ""
        yield from (f"- {markdown_text(note)}" for note in notes)


def _per_key(shrunk: Shrunk) -> Report[tuple[Pick, NamedInts]]:
    configs = shrunk.kernel.triton_config

    def picked_at_run_time(one: Pick) -> str:
        """What run-time tuning took in the recorded run, against the best."""
        picked = one.launch.config if one.launch else None
        same = [loss for config, loss in one.study.slowdowns.items() if picked and _is_same(configs(config), picked)]
        return slower(same[0]) if same else ""

    columns: list[Column[tuple[Pick, NamedInts]]] = [
        left("problem", lambda row: _problem(row[0], shrunk.picks)),
        left("best", lambda row: described(configs(_best(row[0])))),
        right("us", lambda row: microseconds(row[0].study.times_us[_best(row[0])])),
        left("chosen", lambda row: described(configs(row[1]))),
        right("loss", lambda row: slower(row[0].study.slowdowns[row[1]])),
        right("run-time tuning's pick", lambda row: picked_at_run_time(row[0])),
        left("evidence", lambda row: f"{row[0].evidence}; {row[0].study.pick.check}"),
    ]
    return Report("", columns, list(zip(shrunk.picks, shrunk.cover.chosen, strict=True)))


def _problem(one: Pick, among: Sequence[Pick]) -> str:
    """Shape and dtype; the layout too, which says which launch it is, where another problem has the same."""

    def said(each: Pick) -> str:
        return f"{each.problem.shape} {each.problem.in_dtype}"

    is_alone = sum(said(each) == said(one) for each in among) == 1
    return said(one) if is_alone else f"{said(one)} {one.problem.input_layout}"


def _best(one: Pick) -> NamedInts:
    """The fastest; of equals the pick, for another may only have been screened."""
    return min(
        one.study.slowdowns, key=lambda config: (one.study.slowdowns[config], config != one.config, config.canonical)
    )


def _is_same(config: Config, other: Config) -> bool:
    return (dict(config.kwargs), config.options) == (dict(other.kwargs), other.options)


def described(config: Config) -> str:
    """``BLOCK=128 num_warps=4 num_stages=3``."""
    return " ".join(f"{name}={value}" for name, value in {**config.kwargs, **config.options}.items())
