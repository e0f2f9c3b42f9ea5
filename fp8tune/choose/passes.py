"""Which method each pass of ``fp8_grouped_mm`` multiplies by, and what the choice rests on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fp8tune.records import NamedInts
from fp8tune.stats.study import Study
from fp8tune_kernels.catalog import METHODS, PASSES, PRECISIONS
from fp8tune_kernels.spec import PRECISION_FLAG

AXIS = "METHOD"
LAYER = ("M", "N", "K", "G")
_BF16_TORCH = NamedInts(METHOD=0)


@dataclass(frozen=True, eq=False)
class Choice:
    """The method of one pass of a layer with one precision."""

    study: Study
    times_us: Mapping[str, float]
    """Method -> its time, of finals where it was in them, else of the screen."""
    bf16_us: float | None
    """Of the same pass by torch's bf16 GEMM; None where it has no time."""

    @property
    def layer(self) -> NamedInts:
        """The sizes of the layer."""
        return _layer(self.study.problem.shape)

    @property
    def of_pass(self) -> str:
        """``forward``, ``input gradient`` or ``weight gradient``."""
        return self.study.problem.kernel.removeprefix("grouped-mm-").replace("-", " ")

    @property
    def precision(self) -> str:
        """One of :data:`~fp8tune_kernels.catalog.PRECISIONS`."""
        return _named(PRECISIONS, self.study.problem.shape[PRECISION_FLAG])

    @property
    def method(self) -> str:
        """The pick, one of :data:`~fp8tune_kernels.catalog.METHODS`."""
        return method_name(self.study.pick.config or {})

    @property
    def speedup(self) -> float | None:
        """Over :attr:`bf16_us`."""
        return self.bf16_us / self.study.choice.time_us if self.bf16_us is not None else None


def method_name(config: Mapping[str, int]) -> str:
    """The name of METHOD in a config."""
    return _named(METHODS, config.get(AXIS, -1))


def choices(found: Iterable[Study], layers: Collection[NamedInts] | None = None) -> list[Choice]:
    """The choices of all passes among what competes, layer by layer; of some layers alone, if given."""
    of_passes = [
        each
        for each in found
        if each.problem.kernel in PASSES and (layers is None or _layer(each.problem.shape) in layers)
    ]
    bf16_us: dict[object, float] = {}
    for each in of_passes:
        if _BF16_TORCH in each.times_us:
            bf16_us.setdefault(_question(each), each.times_us[_BF16_TORCH])
    made = []
    for each in sorted(of_passes, key=_order):
        times_us = {method_name(config): time_us for config, time_us in sorted(each.times_us.items(), key=_by_method)}
        own_us = each.times_us.get(_BF16_TORCH, bf16_us.get(_question(each)))
        made.append(Choice(each, times_us, own_us))
    return made


def layer_of(row: Mapping[str, int]) -> NamedInts | None:
    """The layer of a row of a shape set; None for a row that is none."""
    if not {"M", "N", "K", "E"} <= row.keys():
        return None
    return NamedInts(M=row["M"], N=row["N"], K=row["K"], G=row["E"])


def _layer(shape: Mapping[str, int]) -> NamedInts:
    return NamedInts([(dim, shape[dim]) for dim in LAYER])


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


def _by_method(timed: tuple[NamedInts, float]) -> int:
    return timed[0].get(AXIS, -1)


def _question(candidates: Study) -> object:
    """The same for one pass of a layer, whatever its precision."""
    problem, device = candidates.problem, candidates.device
    return problem.kernel, _layer(problem.shape), problem.routing, problem.seed, device.arch, device.name


def _order(candidates: Study) -> tuple[object, ...]:
    problem, device = candidates.problem, candidates.device
    sizes = [problem.shape[dim] for dim in ("K", "N", "G", "M")]
    place = PASSES.index(problem.kernel), problem.shape[PRECISION_FLAG]
    return device.arch, device.name, problem.routing, problem.seed, sizes, place
