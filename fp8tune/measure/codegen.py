"""Settings that change the machine code of a Triton kernel, besides its source, its config and the versions.

Triton reads much of it from the environment, and its defaults change: FP fusion, which contracts a product and a sum
into one rounding, is on by default up to Triton 3.9 and announced to be off from 3.10. So workers set it explicitly,
and rows keep the settings.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping

from fp8tune.replay.lazy import triton

FP_FUSION = "TRITON_DEFAULT_FP_FUSION"

# Triton's variables: whatever starts as only its own do, and those whose names other programs may have, too.
_CODEGEN = re.compile(
    "(TRITON|PTXAS|NVPTX|AMDGCN)_[A-Z0-9_]+|DISABLE_(LLVM_OPT|PTXAS_OPT|MMA_V[0-9]+)|ALLOW_LHS_TMEM_LAYOUT_CONVERSION"
    "|LLVM_(PASS_PLUGIN_PATH|EXTRACT_DI_LOCAL_VARIABLES)"
)

# Variables that choose folders, dumps and messages. Any other of Triton's may change code, known here or not.
_NEUTRAL = re.compile(
    "TRITON_(CACHE|HOME|PRINT|INTERPRET|ALWAYS_COMPILE|REPRODUCER|STORE_BINARY_ONLY|REMOTE_CACHE|REDIS|PROTON|LIBCUDA"
    "|LIBHIP|CUDACRT|CUDART|LLVM_DEBUG|ENABLE_(LLVM_DEBUG|PYTHON_STACKTRACE|NVTX)"
    "|FRONT_END_DEBUGGING).*|[A-Z0-9_]*DUMP[A-Z0-9_]*"
)


def fp_fusion(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether kernels are compiled with FP fusion: yes, unless the environment turns it off."""
    return environment.get(FP_FUSION, "1").strip().lower() in ("1", "on", "y", "yes", "true")


def settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return one text per set of settings, such as ``fp_fusion=1 DISABLE_LLVM_OPT=1``.

    Values that are paths are replaced by a hash, so that no row names a folder of somebody's machine.
    """
    parts = [f"fp_fusion={int(fp_fusion(environment))}"]
    for name, value in sorted(environment.items()):
        if value and name != FP_FUSION and _CODEGEN.fullmatch(name) and not _NEUTRAL.fullmatch(name):
            is_plain = re.fullmatch("[A-Za-z0-9_.,:=-]{1,40}", value)
            parts.append(f"{name}={value if is_plain else hashlib.sha256(value.encode()).hexdigest()[:8]}")
    return " ".join(parts)


def fix_fp_fusion(enabled: bool) -> None:
    """Set Triton's default of this process. Its cache keys stay those of a program that leaves the default alone."""
    warnings.filterwarnings("ignore", FP_FUSION)  # Triton 3.9 warns once a process that the default will change
    knobs = triton.knobs
    if hasattr(knobs.language, "default_fp_fusion"):  # a version without it always fuses
        propagates, knobs.propagate_env = knobs.propagate_env, False
        try:
            knobs.language.default_fp_fusion = enabled
        finally:
            knobs.propagate_env = propagates
