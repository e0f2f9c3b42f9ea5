"""Declare the edges of a kernel: the small inputs on which every config is checked before it is timed.

The timed sizes are multiples of every block, of normally distributed values at aligned addresses; an edge is not.
Triton specializes code on sizes of 1 or of multiples of 16, and on addresses of multiples of 16 bytes. So 48 columns
run the binary that is timed with 8192. A size of 1, an odd one and an odd address have binaries of their own, which are
compiled for every config: edges combine these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from .spec import Edge, NamedInts, Problem, bucket

Size = int | Callable[[Mapping[str, int]], int]
"""A size of an edge, or a function of the shape that is timed."""

Declaration = Callable[[Problem], Edge]


def edge(name: str, content: str = "random", offset: int = 0, routing: str | None = None, **sizes: Size) -> Declaration:
    """Return an edge beside any problem, see :class:`~fp8tune_kernels.spec.Edge`.

    Dims without a size keep the timed one, and routing None, dtypes, scale mode and input layout are the problem's.
    """

    def beside(problem: Problem) -> Edge:
        changes = {dim: size if isinstance(size, int) else size(problem.shape) for dim, size in sizes.items()}
        shape = NamedInts({**problem.shape, **changes})
        return Edge(name, replace(problem, shape=shape, routing=routing or problem.routing), content, offset)

    return beside


def declared(*edges: Declaration) -> Callable[[Problem], Iterator[Edge]]:
    """Return the function that :attr:`~fp8tune_kernels.spec.KernelSpec.edges` takes."""
    return lambda problem: (edge(problem) for edge in edges)


def past_half(dim: str, by: int = 1) -> Callable[[Mapping[str, int]], int]:
    """Return a size past the largest power of two that is below the size of ``dim``: 4097 for 5120 and for 8192.

    It is ``by`` more than a multiple of every shorter tile, and has the timed size's next power of two: its own tile.
    """
    return lambda shape: bucket(max(shape[dim] - 1, 0)) + by


def long_tail(dim: str) -> Callable[[Mapping[str, int]], int]:
    """Return a size of which every tile shorter than half of it leaves nearly a tile: 6128 for 5120 and for 8192.

    The largest of a row is then as likely to be in the tail as in any other tile.
    """
    return lambda shape: max(3 * bucket(max(shape[dim] - 1, 0)) // 2 - 16, 1)


def at_most(dim: str, size: int) -> Callable[[Mapping[str, int]], int]:
    """Return the timed size of ``dim``, but no more than ``size``: large on a GPU, not on the interpreter."""
    return lambda shape: min(shape[dim], size)
