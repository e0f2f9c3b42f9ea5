"""What ``Autotuner.run`` does once it has chosen: hooks, heuristics, the launch. Chosen is what the caller says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8tune.autotuned.configs import decoded
from fp8tune.autotuned.encoding import Unrecordable, config_of
from fp8tune.autotuned.problems import tensors_of
from fp8tune.autotuned.tensors import Case
from fp8tune.autotuned.values import decoded as value_of
from fp8tune.errors import UsageError, in_spec
from fp8tune.recording import CONFIG_OPTIONS, Config, Grid, Kernel, Launch
from fp8tune.records import NamedInts

GRIDLESS = "the recording has no grid for it: record again with this config among the kernel's own"

UNLISTED = "not in the list that the program set for this launch"


class Launcher:
    """A kernel as it was found in its module: an ``Autotuner``, ``Heuristics`` around or in it, or a bare function."""

    def __init__(self, kernel: Kernel, function: Any, is_exact: bool = False) -> None:
        self.kernel, self._is_exact = kernel, is_exact
        self._heuristics: list[Any] = []
        node = function
        while not hasattr(node, "configs") and hasattr(node, "values") and hasattr(node, "fn"):
            self._heuristics.append(node)
            node = node.fn
        self.autotuner: Any = node if hasattr(node, "configs") else None
        self._fn = node.fn if self.autotuner is not None else node
        self._pruner_configs: list[Any] = []
        """Triton's configs of ``kernel.pruner_configs``, whose hooks are no texts."""
        self._chosen: dict[tuple[str, NamedInts], tuple[Any, tuple[int, ...]]] = {}

    @property
    def zeroed(self) -> frozenset[str]:
        """The arguments of ``reset_to_zero``."""
        return frozenset(getattr(self.autotuner, "reset_to_zero", None) or ())

    @property
    def restored(self) -> frozenset[str]:
        """The arguments of ``restore_value``."""
        return frozenset(getattr(self.autotuner, "restore_value", None) or ())

    def case(self, launch: Launch, device: str) -> Case:
        """A launch on a device, with what the kernel declares of its arguments."""
        return Case(launch, device, self.zeroed, self.restored, self._is_exact)

    def launch(self, config: Mapping[str, int], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """With exactly this config. Raises ValueError where its grid was not recorded."""
        case: Case = inputs[-1]
        chosen, grid = self._choice(case.launch, config)
        named, options = case.arguments(inputs, outputs), self._options(case.launch)
        for node in self._heuristics:
            for name, heuristic in node.values.items():
                named[name] = heuristic({**named, **options})
        given = {**options, **chosen.all_kwargs()}
        if chosen.pre_hook is not None:
            named |= {one.name: _copied(named[one.name]) for one in tensors_of(case.launch) if one.descriptor}
            chosen.pre_hook({**named, **given})
        self._fn.run(**{**named, **given}, grid=grid, warmup=False)

    def prepare(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Put back what a launch reads in its outputs."""
        case: Case = inputs[-1]
        case.prepare(inputs, outputs)

    @property
    def has_hook(self) -> bool:
        """Whether the kernel was declared with a ``pre_hook`` of its own: see :meth:`hook`."""
        return bool(getattr(self.autotuner, "user_defined_pre_hook", False))

    def hook(self, config: Mapping[str, int], inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Call the autotuner's own ``pre_hook`` before a launch of a config, as run-time tuning does.

        A ``post_hook`` is not called: it puts back what a launch wrote, which is to be checked.
        """
        case: Case = inputs[-1]
        chosen, _ = self._choice(case.launch, config)
        given = {**case.arguments(inputs, outputs), **self._options(case.launch), **chosen.all_kwargs()}
        self.autotuner.pre_hook(given)

    @property
    def unused(self) -> str:
        """What the kernel declares and a sweep does without; empty where there is nothing."""
        if getattr(self.autotuner, "perf_model", None) is None:
            return ""
        return "its perf_model and top_k are not used: every config is timed"

    def unlisted(self, launch: Launch, config: NamedInts) -> str | None:
        """Why a declared config is none of a launch's."""
        if self.kernel.pruner_configs or launch.configs is None or decoded(self.kernel, config) in launch.configs:
            return None
        return UNLISTED

    def pruned(self, launch: Launch, config: NamedInts) -> str | None:
        """Why the kernel itself does not run a config on a launch."""
        chosen = decoded(self.kernel, config)
        if grid_of(launch.grid, chosen) is None:
            return GRIDLESS
        if getattr(self.autotuner, "early_config_prune", None) is None:
            return None
        asked, declared = self.config(chosen), self._listed(launch)
        if asked not in declared and not self.kernel.pruner_configs:
            declared.append(asked)
        return None if asked in self._kept(launch, declared, chosen) else "early_config_prune of the kernel"

    def with_pruner_configs(self) -> Kernel:
        """The kernel with the configs that its ``early_config_prune`` makes, if it returns any but the declared ones.

        Triton times whatever the function returns. Raises UsageError where it raises, or returns what rows cannot hold.
        """
        prune: Any = getattr(self.autotuner, "early_config_prune", None)
        kept: list[Any] = []
        adds_configs = False
        for launch in self.kernel.launches if prune is not None else ():
            listed = self._listed(launch)
            try:
                returned = self._kept(launch, listed, config_of(listed[0]))
                kept += [config for config in returned if config not in kept]
                adds_configs |= any(config not in listed for config in returned)
            except Exception as error:
                raise in_spec(self.kernel.name, "early_config_prune", prune, error) from error
        if adds_configs:
            try:
                self.kernel = replace(self.kernel, pruner_configs=tuple(map(config_of, kept)))
            except Unrecordable as error:
                raise UsageError(f"{self.kernel.name}: early_config_prune makes a config with {error}") from None
            self._pruner_configs = kept
        return self.kernel

    def _kept(self, launch: Launch, listed: list[Any], config: Config) -> Sequence[Any]:
        """Return what ``early_config_prune`` returns for a launch. ``config``: the config whose grid it gets."""
        case = self.case(launch, "meta")
        named = case.arguments(case.inputs(0), case.outputs())
        given = {**named, **self._options(launch), "grid": grid_of(launch.grid, config), "warmup": False}
        return list(self.autotuner.early_config_prune(listed, named, **given) or ())

    def _listed(self, launch: Launch) -> list[Any]:
        return list(self.autotuner.configs) if launch.configs is None else [self.config(one) for one in launch.configs]

    def config(self, chosen: Config) -> Any:
        """As Triton has it, with the hook that the kernel declares for it."""
        import triton

        kwargs = {name: value_of(value) for name, value in chosen.kwargs.items()}
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, "num_ctas": chosen.num_ctas}
        made = triton.Config(kwargs, **options, maxnreg=chosen.maxnreg)
        if chosen.has_pre_hook:
            declared = [each for each in (*self._pruner_configs, *self.autotuner.configs) if each.pre_hook is not None]
            same = [each for each in declared if each.kwargs == kwargs]
            alike = [each for each in same if each.all_kwargs() == made.all_kwargs()]
            made.pre_hook = next(each.pre_hook for each in (*alike, *same, *declared))
        return made

    def _options(self, launch: Launch) -> dict[str, Any]:
        """Of the launch, less what a config sets."""
        return {name: value_of(value) for name, value in launch.options.items() if name not in CONFIG_OPTIONS}

    def _choice(self, launch: Launch, config: Mapping[str, int]) -> tuple[Any, tuple[int, ...]]:
        place = (launch.id, NamedInts(config))
        if place not in self._chosen:
            chosen = decoded(self.kernel, NamedInts(config))
            grid = grid_of(launch.grid, chosen)
            if grid is None:
                raise ValueError(GRIDLESS)
            self._chosen[place] = (self.config(chosen), grid)
        return self._chosen[place]


def _copied(described: Any) -> Any:
    """A TensorDescriptor whose block shape a config's hook may set."""
    copied = copy.copy(described)
    copied.block_shape = list(described.block_shape)
    return copied


def grid_of(grid: Grid, config: Config) -> tuple[int, ...] | None:
    """The programs of a config; None where they were not recorded."""
    options = {name: getattr(config, name) for name in CONFIG_OPTIONS}
    return grid.of({**options, **config.kwargs})
