"""The config that a kernel would launch on a shape, and its origin."""

import fp8tune

for shape in ("M=16640 K=5120", "M=16640 K=2880"):
    print(fp8tune.lookup("rowwise-2d", shape, arch="sm_90"))
