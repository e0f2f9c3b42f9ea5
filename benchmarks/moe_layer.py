"""Host time and CUDA graphs of whole MoE layers, which ``fp8tune bench --op moe-layer`` does not time.

python -m benchmarks.moe_layer                           # the layers of moe-layer-down
python -m benchmarks.moe_layer --shapes models
python -m benchmarks.moe_layer --contenders fp8tune

    step    median us of forward and backward, do_bench
    graph   the same as a CUDA graph, which has no host time
    host    least us until a step has returned to Python, on an idle GPU
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8tune.plan import shapes
from fp8tune_kernels import fp8_moe_mlp
from fp8tune_kernels.moe.permutation import scatter, sort_rows
from fp8tune_kernels.operations.moe_layer import MOE_LAYER
from fp8tune_kernels.operations.operation import Call, Size, Unavailable

HOST_RUNS = 25
MILLISECONDS = 150


def mlp(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Run ``fp8_moe_mlp`` on rows that torch orders."""
    rows, offs, order, place = sort_rows(x, ids, experts)
    out = fp8_moe_mlp(rows, w13, w2, offs, row_weights=scatter(weights.reshape(-1), place, order))
    return scatter(out, order, place).view(*ids.shape, out.shape[1]).sum(1)


def median_us(function: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=40, rep=MILLISECONDS, return_mode="median")) * 1e3


def graph_us(call: Call) -> float:
    """Return the median time of a step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's accumulators are made on the stream that is captured
        call.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call.step()
    return median_us(graph.replay)


def host_us(call: Call) -> float:
    """Return the least time until a step has returned to Python."""
    times = []
    for _ in range(HOST_RUNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call.step()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each layer and contender; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_layer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="moe-layer-down", help="a shape set or TOML file with top_k")
    parser.add_argument("--contenders", default="", help=f"of {', '.join(MOE_LAYER.contenders)}; without it all")
    options = parser.parse_args(arguments)
    names = [name for name in options.contenders.split(";") if name] or list(MOE_LAYER.contenders)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.cuda.get_device_name() if device == "cuda" else "no GPU: nothing is timed", "torch", torch.__version__)
    chosen, failed = shapes.load(options.shapes), False
    for row in chosen.rows:
        for shape, label in MOE_LAYER.sizes(row, chosen.names.get(row, "")):
            inputs = MOE_LAYER.inputs(Size("moe-layer", shape), device)
            print(f"{label} {shape}".strip())
            for name in names:
                try:
                    call = MOE_LAYER.contenders[name](inputs)
                    call.step()
                    times = (median_us(call.step), graph_us(call), host_us(call)) if device == "cuda" else ()
                    print(f"  {name:24s}", *(f"{time_us:9.0f}" for time_us in times), flush=True)
                except Unavailable as reason:
                    print(f"  {name:24s} {reason}")
                except Exception as error:
                    failed = True
                    print(f"  {name:24s} {type(error).__name__}: {str(error)[:200]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
