"""Where kernels run in tests: on the GPU where there is one, else on Triton's interpreter."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("fp8tune", deadline=None)  # a busy machine, or a first import inside a test, is no failure
settings.load_profile("fp8tune")

os.environ["FP8TUNE_TABLES"] = ""  # lookups read no table of whoever runs the tests

# Triton reads it when it is imported and when a kernel is decorated. On a GPU tests are of compiled kernels, whatever
# the environment says.
if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    """The torch device kernels run on in this session."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def quantizers_in_plain_torch() -> Iterator[None]:
    """Without a GPU, quantize in plain torch, to the same bytes: Triton's interpreter takes ten seconds a step."""
    from fp8tune_kernels import catalog

    library = torch.library.Library("fp8tune", "IMPL")
    for kernel in catalog.KERNELS:
        catalog.load(kernel)  # registers its own, which would replace what was there before it
        library.impl(f"quantize_{kernel.replace('-', '_')}", _in_plain_torch(kernel), "CPU", allow_override=True)
    yield
    library._destroy()


def _in_plain_torch(kernel: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    def quantize(*arguments: Any) -> tuple[torch.Tensor, ...]:
        from fp8tune_kernels import catalog

        *tensors, dtype, mode = arguments
        results: tuple[torch.Tensor, ...] = catalog.load(kernel).reference(*tensors, dtype or torch.float8_e4m3fn, mode)
        return results

    return quantize
