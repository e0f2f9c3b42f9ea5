"""torchrun whose ranks are forked from its own process: else each of them would import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks import expert_parallel

assert "torch._dynamo" not in sys.modules  # layers load no compiler, which takes a second


def forking(config: LaunchConfig, entrypoint: object) -> Callable[..., Any]:
    """Launch the benchmark in place of a command that begins with Python's ``-u -m MODULE``."""
    config.start_method = "fork"

    def rank(_unbuffered: str, _is_module: str, module: str, *arguments: str) -> int:
        assert module == expert_parallel.__name__
        return expert_parallel.main(arguments)

    return elastic_launch(config, rank)


if __name__ == "__main__":
    with mock.patch.object(run, "elastic_launch", forking):
        run.main(sys.argv[1:])
