"""Blocks, the only primitive of timing: repeated launches of one function in one process, by the GPU's own clock.

The protocol is that of ``triton.testing.do_bench``: the same flush of the cache before each launch, events around it,
the same warm-up and length. In contrast to it, each launch is queued before the GPU reaches it
(:mod:`fp8tune.measure.gate`), because a busy host would otherwise add its own time.

Events around one short launch also time how it starts. In a CUDA graph (a HIP graph on AMD) many launches share one
start and one timer tick: the block then times replays, each after a flush, and a sample is their share of it. Each
launch of a graph has tensors of its own. So a launch finds its inputs in memory, as a step of decoding does whose
weights fill the cache several times, and as a launch timed by events does: rows of both timings differ in how launches
start, not in the state of the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fp8tune.errors import one_line
from fp8tune.records import Outcome, Status
from fp8tune.replay.lazy import torch
from fp8tune.stats.means import trimmed_mean

if TYPE_CHECKING:
    from fp8tune.measure.gate import GpuStream

WARMUP_MS = 2.0
MIN_REP_MS = 10.0
"""A block takes ``max(10 ms, 5 launches)``, flushes included, of the GPU's time or the host's, whichever is longer."""

# A queue takes about 1,024 operations before the host has to wait. 150 launches with flushes and events are 600, and
# each kernel of a larger launch needs at least 5 us of host time.
HELD_LAUNCHES = 150
HELD_HOST_US = 4000.0

# The gate opens once so much is queued that a GPU which needs 70 % of its time does not catch up with the host, at
# least a fifth. Waiting for the whole queue instead made a sweep of short kernels a sixth longer.
MIN_LEAD = 0.2
SAFETY = 0.7

# Of two launches, 10 of 1,548 configs of colwise on an H200 differed by more than 5 % from sweep to sweep.
SLOW_LAUNCHES = 5  # launches of a block whose config is too slow to be the pick

# A replay of so many launches, 300 us where memory is the limit, makes its start about 1 % of a launch of 2 us. Every
# config of a problem gets the same number, so that the same share of the start is in each time.
REPLAY_US = 300.0
MOST_IN_GRAPH = 64
_LEAST_LAUNCH_US = 2.0
_BYTES_PER_US = 3e6

UNGATED = "the launch waits for the GPU, so the host's time counts too"


@dataclass(frozen=True)
class Prepared:
    """A launch with a step before it that is not timed."""

    prepare: Callable[[], object]
    launch: Callable[[], object]
    launches: int = 1  # that a call enqueues, as the replay of a graph does: a sample is the time of one

    def __call__(self) -> None:
        """Prepare and launch."""
        self.prepare()
        self.launch()


def block(launch: Callable[[], object], too_slow_us: float | None = None, stream: GpuStream | None = None) -> Outcome:
    """Time one block on the current device. The launch must have run once before, so that nothing compiles here.

    The reason of the outcome is :data:`UNGATED` if the GPU had to wait for the host.

    Args:
        launch: Enqueues the work once.
        too_slow_us: If two launches both take longer, a few more are the whole block.
        stream: A stand-in for the GPU's stream.
    """
    if stream is None:
        from fp8tune.measure.gate import GpuStream  # declares a Triton kernel: only processes with a GPU import it

        stream = GpuStream()
    prepared = launch if isinstance(launch, Prepared) else Prepared(lambda: None, launch)
    stream.flush()
    stream.synchronize()
    begun = stream.clock()
    prepared()  # loads everything: a module that is loaded behind a closed gate would wait for it
    launch_host_us = max(1.0, 1e6 * (stream.clock() - begun))
    stream.synchronize()
    most = max(1, min(HELD_LAUNCHES, int(HELD_HOST_US / launch_host_us)))
    # Gates: launches behind one at most, and the share of them that is queued when it opens, 0 for no gate. The next is
    # tried once the GPU has caught up with the host, which a full queue causes as well.
    gates = [(most, 1.0), (max(1, most // 4), 1.0), (most, 0.0)]

    def timed(count: int, warmup: int = 0) -> tuple[tuple[float, ...], float, float]:
        while (result := _launches(prepared, stream, *gates[0], count, warmup)) is None:
            del gates[0]
        _, gpu_us, host_us = result
        lead = max(MIN_LEAD, 1 - SAFETY * gpu_us / host_us)
        if gates[0][1] == 1.0 and lead < 1.0:
            gates.insert(0, (gates[0][0], lead))
        return result

    samples_us, gpu_us, host_us = timed(2)
    fastest_us = min(samples_us)
    if too_slow_us is not None and fastest_us > too_slow_us * prepared.launches:
        samples_us, _, _ = timed(SLOW_LAUNCHES)
    else:
        rep_ms = max(MIN_REP_MS, 5 * fastest_us / 1e3)
        launch_us = max(gpu_us, host_us)  # a slow host gets fewer launches, not more time
        warmup, repeats = (max(1, int(1e3 * ms / launch_us)) for ms in (WARMUP_MS, rep_ms))
        samples_us, _, _ = timed(repeats, warmup)
    samples_us = tuple(sample / prepared.launches for sample in samples_us)
    reason = UNGATED if gates[0][1] == 0 else ""
    # The smallest step between two samples is an upper bound of the timer's tick.
    steps = (high - low for low, high in pairwise(sorted(set(samples_us))) if high - low > 1e-6)
    return Outcome(Status.OK, trimmed_mean(samples_us), reason, samples_us, min(steps, default=None))


def _launches(
    prepared: Prepared, stream: GpuStream, most: int, lead_share: float, count: int, warmup: int
) -> tuple[tuple[float, ...], float, float] | None:
    """Time so many launches after others that are not timed; None if the GPU had to wait for the host.

    Return the samples, and the microseconds of a launch with flush and events on the GPU and on the host.
    """
    samples_us, gpu_ms, host_s = list[float](), 0.0, 0.0
    for _ in range(warmup):
        prepared()
    while len(samples_us) < count:
        size = min(most, count - len(samples_us))
        begin, events = stream.event(), [(stream.event(), stream.event()) for _ in range(size)]
        lead, ran_dry = math.ceil(lead_share * size), False
        if lead:
            stream.close_gate()
        started = stream.clock()
        try:
            begin.record()
            for number, (start, end) in enumerate(events, 1):
                prepared.prepare()  # it leaves outputs in the cache, so the flush comes after it
                stream.flush()
                start.record()
                prepared.launch()
                end.record()
                if ran_dry := lead > 0 and start.query():
                    break
                if number == lead:
                    stream.open_gate()
        finally:
            stream.open_gate()
        host_s += stream.clock() - started
        stream.synchronize()
        if ran_dry:
            return None
        samples_us += [1e3 * start.elapsed_time(end) for start, end in events]
        gpu_ms += begin.elapsed_time(events[-1][1])
    return tuple(samples_us), 1e3 * gpu_ms / count, 1e6 * host_s / count


def graph_launches(bytes_moved: int) -> int:
    """Return the number of launches that a CUDA graph holds for a problem."""
    return max(1, min(MOST_IN_GRAPH, int(REPLAY_US / (_LEAST_LAUNCH_US + bytes_moved / _BYTES_PER_US))))


class CaptureError(Exception):
    """A launch cannot be captured."""


def capture(launches: Sequence[Callable[[], object]]) -> Any:
    """Return a CUDA graph of launches, in their order. They must have run before, so that nothing is loaded here.

    Raises CaptureError for a launch that waits for the GPU, or calls what a graph cannot hold.
    """
    # torch.cuda.graph also collects garbage and gives memory back, which takes longer than a block and slows it down
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            except BaseException:
                with contextlib.suppress(Exception):  # it fails as well, and says less
                    graph.capture_end()
                raise
            graph.capture_end()
    except Exception as error:
        raise CaptureError(one_line(error)) from error
    torch.cuda.current_stream().wait_stream(stream)
    return graph
