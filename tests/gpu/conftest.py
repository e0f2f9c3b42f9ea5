from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock


@pytest.fixture
def whole_gpu() -> Iterator[None]:
    """One large test at a time, however many processes run tests."""
    with FileLock(str(Path(tempfile.gettempdir()) / "fp8tune-large-tests.lock")):
        yield
        torch.cuda.empty_cache()
