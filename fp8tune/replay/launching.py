"""Launch a recorded kernel as ``Autotuner.run`` does once it has chosen: hooks, heuristics, the launch itself."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8tune.errors import UsageError, in_spec
from fp8tune.records import NamedInts
from fp8tune.replay.case import Case, bits
from fp8tune.replay.configs import decoded, may_vary
from fp8tune.replay.lazy import torch
from fp8tune.replay.recording import CONFIG_OPTIONS, Config, Kernel, Launch
from fp8tune.replay.values import Unrecordable, config_of, triton_config
from fp8tune.replay.values import decoded as decoded_value
from fp8tune_kernels.spec import Tolerance
from fp8tune_kernels.tuners import HookUnknownError, chain, tuner_of

_POISONS = (0x7B, 0x84)  # bytes of large values: an element that has both in turn was not written
_LOST_DEVICE = ("CUDA error", "HIP error", "AcceleratorError", "illegal memory")  # after these nothing can be launched

Tensors = tuple[Any, ...]


class Launcher:
    """A kernel as its module has it: an ``Autotuner``, ``Heuristics`` around or in it, or a bare function."""

    def __init__(
        self,
        kernel: Kernel,
        function: Any,
        is_exact: bool = False,
        make_inputs: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        self.kernel, self._is_exact, self._make_inputs = kernel, is_exact, make_inputs
        self.autotuner = tuner_of(function)
        self._fn = function if self.autotuner is None else self.autotuner.fn
        around = itertools.takewhile(lambda item: item is not self.autotuner, chain(function))
        self._heuristics = [rule for node in around for rule in node.values.items()] if self.autotuner else []
        self._listed: list[Any] = list(getattr(self.autotuner, "configs", ()))
        self._declared = self._listed
        """Triton's configs, whose hooks are no texts; those that ``early_config_prune`` makes come first."""
        self._prune: Any = getattr(self.autotuner, "early_config_prune", None)
        self._choices: dict[tuple[str, NamedInts], tuple[Any, tuple[int, ...] | None]] = {}
        self._made: dict[tuple[str, NamedInts], tuple[Tensors, dict[str, Any]]] = {}
        """Launch and config -> the inputs of a case, and those that the user's function made of them."""
        self.has_hook = bool(getattr(self.autotuner, "user_defined_pre_hook", False))
        """True if the kernel was declared with a ``pre_hook`` of its own: see :meth:`hook`."""

    def case(self, launches: Sequence[Launch], device: str) -> Case:
        """Return launches on a device, with what the kernel declares of its arguments."""
        zeroed, restored = (getattr(self.autotuner, name, None) or () for name in ("reset_to_zero", "restore_value"))
        return Case(tuple(launches), device, frozenset(zeroed), frozenset(restored), self._is_exact)

    def launch(self, config: Mapping[str, int], inputs: Tensors, outputs: Tensors) -> None:
        """Launch with exactly this config. Raises ValueError where its grid was not recorded."""
        for launch, arguments, chosen, grid in self._chosen(config, inputs, outputs):
            if self._make_inputs is not None:
                place = launch.id, NamedInts(config)
                if place not in self._made or self._made[place][0] is not inputs:  # once for a config
                    self._made[place] = inputs, self._made_inputs(launch, chosen, inputs[-1], arguments)
                arguments |= self._made[place][1]
                grid = arguments.pop("grid", grid)
            if grid is None:
                raise ValueError(_gridless(launch, decoded(self.kernel, NamedInts(config))))
            self.run(launch, chosen, arguments, grid=grid, warmup=False)

    def hook(self, config: Mapping[str, int], inputs: Tensors, outputs: Tensors) -> None:
        """Call the autotuner's own ``pre_hook`` before a launch of a config, as run-time tuning does.

        A ``post_hook`` is not called: it puts back what a launch wrote, which is to be checked.
        """
        for launch, arguments, chosen, _ in self._chosen(config, inputs, outputs):
            self.autotuner.pre_hook({**arguments, **_options(launch), **chosen.all_kwargs()})

    def _chosen(self, config: Mapping[str, int], inputs: Tensors, outputs: Tensors) -> Iterator[tuple[Any, ...]]:
        """Yield each launch with its arguments, the config as Triton has it, and its programs."""
        config, case = NamedInts(config), inputs[-1]
        for launch, arguments in zip(case.launches, case.arguments(inputs, outputs), strict=True):
            place = launch.id, config
            if place not in self._choices:
                choice = decoded(self.kernel, config)
                self._choices[place] = triton_config(choice, self._declared), launch.grid.programs(choice.values)
            yield launch, arguments, *self._choices[place]

    def run(self, launch: Launch, chosen: Any, arguments: dict[str, Any], **launch_options: Any) -> Any:
        """Launch, or only compile, with a config of Triton's and arguments by parameter."""
        options = _options(launch)
        for name, heuristic in self._heuristics:
            arguments[name] = heuristic({**arguments, **options})
        options |= chosen.all_kwargs()
        if chosen.pre_hook is not None:
            for name in (item.name for item in launch.tensors if item.descriptor and item.name in arguments):
                arguments[name] = copy.copy(arguments[name])  # a config's hook may set its block shape
                arguments[name].block_shape = list(arguments[name].block_shape)
            chosen.pre_hook({**arguments, **options})
        return self._fn.run(**{**arguments, **options}, **launch_options)

    def compile(self, launch: Launch, config: Config) -> Any:
        """Compile a launch with a config, and return what Triton does."""
        chosen = triton_config(config, self._listed)
        return self.run(launch, chosen, self._arguments(launch), grid=(1, 1, 1), warmup=True)

    def _arguments(self, launch: Launch) -> dict[str, Any]:
        """Return the arguments of a launch without memory."""
        case = self.case([launch], "meta")
        return case.arguments(case.inputs(0), case.outputs())[0]

    def _made_inputs(self, launch: Launch, chosen: Any, case: Case, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs that the user's function makes for a config. Raises UsageError if they are none."""
        make, is_meta = self._make_inputs, case.device == "meta"
        assert make is not None
        if is_meta:  # compiled only, and yet it may look at integers, such as the expert of each row
            arguments = arguments | case.integers(launch)
        try:
            inputs = dict(make(chosen.all_kwargs(), **arguments))
        except Exception as error:
            raise in_spec(self.kernel.name, "inputs", make, error) from error
        written = {item.name for storage in case.written for item in storage.arguments}
        if strange := [name for name in inputs if name != "grid" and (name not in arguments or name in written)]:
            raise UsageError(f"{self.kernel.name}: inputs gives {strange[0]!r}, which the kernel does not only read")
        return {
            name: value.to("meta") if is_meta and hasattr(value, "dtype") else value for name, value in inputs.items()
        }

    def pruned(self, launches: Sequence[Launch], config: Mapping[str, int]) -> str | None:
        """Explain why the kernel itself does not run a config on launches; None if it does."""
        chosen = decoded(self.kernel, NamedInts(config))
        for launch in launches if self._make_inputs is None else ():
            if launch.grid.programs(chosen.values) is None:
                return _gridless(launch, chosen)
            if reason := _unfollowed(launch, chosen):
                return reason
        for launch in launches:
            try:
                triton_chosen = triton_config(chosen, self._declared)
            except HookUnknownError as error:
                return str(error)
            is_added = triton_chosen not in self._listed and not self.kernel.pruner_configs
            listed = [*self._listed, *([triton_chosen] if is_added else ())]
            if self._prune is not None and triton_chosen not in self._unpruned(launch, listed, chosen):
                return "early_config_prune of the kernel"
        return None

    def with_pruner_configs(self) -> Kernel:
        """Return the kernel with the configs that its ``early_config_prune`` makes, if any is not declared.

        Triton times whatever the function returns. Raises UsageError where it raises, or returns what rows cannot hold.
        """
        every: list[Any] = []
        for launch in self.kernel.launches if self._prune is not None else ():
            try:
                returned = self._unpruned(launch, list(self._listed), config_of(self._listed[0]))
                every += [config for config in returned if config not in every]
            except Exception as error:
                raise in_spec(self.kernel.name, "early_config_prune", self._prune, error) from error
        if any(config not in self._listed for config in every):
            try:
                self.kernel = replace(self.kernel, pruner_configs=tuple(map(config_of, every)))
            except Unrecordable as error:
                raise UsageError(f"{self.kernel.name}: early_config_prune makes a config with {error}") from None
            self._declared = [*every, *self._listed]
        return self.kernel

    def _unpruned(self, launch: Launch, listed: list[Any], config: Config) -> list[Any]:
        """Return what ``early_config_prune`` returns for a launch. ``config``: the config whose grid it gets."""
        arguments = self._arguments(launch)
        options = {**_options(launch), "grid": launch.grid.programs(config.values), "warmup": False}
        return list(self._prune(listed, arguments, **{**arguments, **options}) or ())

    def agreed(self, configs: Sequence[NamedInts], inputs: Tensors, bound: Tolerance | None) -> Tensors:
        """Return what the first config that can be launched gives, twice; as float64 where there is a bound.

        Elements that it does not write are noted in the :class:`Case` and are zeros here. Raises ValueError for a
        config that does not agree with itself, what the last config raised where none can be launched.
        """
        case: Case = inputs[-1]
        failure: Exception = ValueError("every config of the kernel is pruned")
        for config in configs:
            runs: list[Tensors] = []
            try:
                for poison in _POISONS:
                    case.untouched.clear()
                    runs.append(outputs := case.outputs())
                    for output in outputs:
                        bits(output).fill_(_repeated(poison, output))
                    case.prepare(inputs, outputs)
                    if self.has_hook:
                        self.hook(config, inputs, outputs)
                    self.launch(config, inputs, outputs)
                    if case.device.startswith("cuda"):
                        torch.cuda.synchronize()
            except Exception as error:
                if any(sign in str(error) for sign in _LOST_DEVICE):
                    raise
                failure = error
            else:
                pairs = enumerate(zip(*runs, strict=True))
                return tuple(_agreed(case, index, config, pair, bound) for index, pair in pairs)
        raise failure


def _options(launch: Launch) -> dict[str, Any]:
    """Return the options of a launch, less those that a config sets."""
    return {name: decoded_value(value) for name, value in launch.options.items() if name not in CONFIG_OPTIONS}


def _gridless(launch: Launch, config: Config) -> str:
    values = ", ".join(f"{axis}={config.values.get(axis)}" for axis in launch.grid.axes)
    return f"the recording has no grid for {values}: record again with this config among the kernel's own"


def _unfollowed(launch: Launch, config: Config) -> str:
    """Name a constant that differs from those of a bare kernel's launch, whose grid does not follow it."""
    for own in launch.configs or ():
        changed = (n for n, value in config.kwargs.items() if value != own.kwargs.get(n) and not may_vary(launch, n))
        if not (name := next(changed, "")):
            return ""
    return f"its grid does not follow {name}" if launch.configs else ""


def _agreed(case: Case, index: int, config: NamedInts, pair: Tensors, bound: Tolerance | None) -> Any:
    """Return the second of two equal outputs, with zeros where both kept their poison."""
    first, second = pair
    untouched = bits(first) == _repeated(_POISONS[0], first)
    untouched &= bits(second) == _repeated(_POISONS[1], second)
    unequal = (bits(first) != bits(second)) & ~untouched
    if first.is_floating_point() and bool(unequal.any()):
        left, right = first.double(), second.double()
        unequal &= ~(left.isnan() & right.isnan())
        if bound is not None:
            unequal &= ~((left - right).abs() <= bound.allowed(left.masked_fill(untouched, 0)))
    if count := int(unequal.sum()):
        differ = f"launched twice, {count} of {first.numel()} elements of {case.written[index].name} differ"
        fix = "add --tolerance 1e-3,1e-5 or exact-sums, or --reference"
        raise ValueError(f"the first config ({config}) is not deterministic: {differ}: {fix}")
    if bool(untouched.any()):
        case.untouched[index] = untouched
        bits(second).masked_fill_(untouched, 0)
    return second.double() if bound is not None and second.is_floating_point() else second


def _repeated(byte: int, tensor: Any) -> int:
    """Return the integer of a byte for a tensor's elements, as torch's signed types (and uint8) take it."""
    size = tensor.element_size()
    return int.from_bytes(bytes([byte] * size), signed=size > 1)
