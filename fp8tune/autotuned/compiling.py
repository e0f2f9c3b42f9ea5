"""What recorded launches read and write where no compiled code was seen: compiled for sm_90 in a process of its own.

That process has no GPU to find and no interpreter, whatever this one has:

    echo '[{"kernel": {...}, "launch": {...}}]' | python -m fp8tune.autotuned.compiling
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8tune.autotuned.ir import Usage, Use, argument_names, usage_of
from fp8tune.autotuned.values import decoded
from fp8tune.errors import MachineError
from fp8tune.recording import Config, Kernel, Launch, Scalar, Tensor, as_json, from_json


def usage(kernel: Kernel, launch: Launch) -> Usage:
    """The use that a kernel makes of each argument of a launch; see :func:`usages`."""
    return usages([(kernel, launch)])[0]


def usages(launches: Sequence[tuple[Kernel, Launch]]) -> list[Usage]:
    """The same of several, in their order; empty for a launch that does not compile.

    Raises MachineError where no process can compile, for example without Triton.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    documents = [
        {
            "kernel": as_json(replace(kernel, launches=())),
            "launch": as_json(replace(launch, arguments=tuple(map(_without_values, launch.arguments)))),
        }
        for kernel, launch in launches
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fp8tune.autotuned.compiling"],
        input=json.dumps(documents),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answers = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise MachineError(f"kernels cannot be compiled here: {said}: install torch and triton") from None
    return [{name: Use(*map(bool, use)) for name, use in one.items()} for one in answers]


def _without_values(argument: Tensor | Scalar) -> Tensor | Scalar:
    return argument if isinstance(argument, Scalar) else replace(argument, values=None)


def _compiled(kernel: Kernel, launch: Launch) -> Usage:
    """Compile one launch with the config it had, else the one declared first."""
    outer = _loaded(kernel.name)
    tuner: Any = outer
    while kernel.is_autotuned and type(tuner).__name__ != "Autotuner" and not hasattr(tuner, "configs"):
        tuner = tuner.fn
    arguments: dict[str, Any] = {one.name: _argument(one) for one in launch.arguments if one.name in kernel.parameters}
    options: dict[str, Any] = {name: decoded(value) for name, value in launch.options.items()}
    if kernel.is_autotuned:
        config = _declared(tuner, launch.config or next(iter(kernel.configs), None))
        if config.pre_hook is not None:
            config.pre_hook({**arguments, **config.all_kwargs()})
        options |= config.all_kwargs()
        tuner = tuner.fn
    compiled = tuner.run(grid=(1, 1, 1), warmup=True, **{**arguments, **options})
    return usage_of(compiled.asm["ttir"], argument_names(compiled.src.signature))


def _declared(tuner: Any, wanted: Config | None) -> Any:
    """The config of the autotuner that was recorded."""
    kwargs = {name: decoded(value) for name, value in wanted.kwargs.items()} if wanted else {}
    return next((config for config in tuner.configs if config.kwargs == kwargs), tuner.configs[0])


def _loaded(name: str) -> Any:
    where, _, attribute = name.rpartition(":")
    sys.path.append(os.getcwd())
    if where.endswith(".py"):
        file = Path(where).absolute()
        root, parts = file.parent, [file.stem]
        while (root / "__init__.py").is_file():
            root, parts = root.parent, [root.name, *parts]
        sys.path.insert(0, str(root))
        where = ".".join(parts)
    return getattr(importlib.import_module(where), attribute)


def _argument(argument: Tensor | Scalar) -> Any:
    import torch

    if isinstance(argument, Scalar):
        return decoded(argument.value)
    dtype = getattr(torch, argument.dtype)
    tensor = torch.empty_strided(argument.shape, argument.strides, dtype=dtype, device="meta")
    if argument.descriptor is None:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(argument.shape), list(argument.strides), list(argument.descriptor))


class _Target:
    """A driver that names an H100-class GPU and has none."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _main() -> None:
    from triton.runtime.driver import driver

    results, sys.stdout = sys.stdout, sys.stderr  # kernels' modules may print
    driver.set_active(_Target())
    answers = []
    for document in json.load(sys.stdin):
        try:
            found = _compiled(from_json(document["kernel"], Kernel), from_json(document["launch"], Launch))
        except Exception as error:  # not known, then
            print(f"{document['kernel']['name']}: {error!r}", file=sys.stderr)
            found = {}
        answers.append(found)
    print(json.dumps(answers), file=results)


if __name__ == "__main__":
    _main()
