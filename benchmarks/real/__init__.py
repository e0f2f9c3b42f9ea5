"""Programs that launch autotuned kernels of other libraries, for ``fp8tune record`` and ``fp8tune tune``."""
