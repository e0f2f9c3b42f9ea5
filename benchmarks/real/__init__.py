"""Programs that launch autotuned kernels of other libraries, for ``fp8tune record``, and the study of their configs."""
