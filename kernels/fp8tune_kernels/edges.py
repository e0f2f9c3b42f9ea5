"""How a kernel declares its edges: the small inputs on which every config is checked before it is timed.

The timed sizes are multiples of every block, of normally distributed values at aligned addresses; an edge is not.
Triton specializes code on sizes of 1 or of multiples of 16, and on addresses of multiples of 16 bytes. So 48 columns
run the binary that is timed with 8192. A size of 1, an odd one and an odd address have binaries of their own, which are
compiled for every config: edges combine these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from .spec import Edge, NamedInts, Problem, bucket

__all__ = ["at_most", "declared", "edge", "long_tail", "past_half"]

Size = int | Callable[[Mapping[str, int]], int]
"""A size of an edge, or how it follows from the shape that is timed."""


@dataclass(frozen=True)
class Declaration:
    """An edge, but for what it has of the problem that is timed: dtypes, scale mode, input layout."""

    name: str
    content: str
    offset: int
    routing: str | None
    """None: the problem's own."""
    sizes: Mapping[str, Size]
    """Dims that are not named keep the size that is timed."""

    def of(self, problem: Problem) -> Edge:
        """The edge beside a problem."""
        shape = {**problem.shape}
        for dim, size in self.sizes.items():
            shape[dim] = size if isinstance(size, int) else size(problem.shape)
        routing = self.routing or problem.routing
        return Edge(self.name, replace(problem, shape=NamedInts(shape), routing=routing), self.content, self.offset)


def edge(name: str, content: str = "random", offset: int = 0, routing: str | None = None, **sizes: Size) -> Declaration:
    """One edge of :func:`declared`: see :class:`~fp8tune_kernels.spec.Edge` for name, content and offset."""
    return Declaration(name, content, offset, routing, sizes)


def declared(*edges: Declaration) -> Callable[[Problem], Iterator[Edge]]:
    """What :attr:`~fp8tune_kernels.spec.KernelSpec.edges` takes."""

    def edges_of(problem: Problem) -> Iterator[Edge]:
        for declaration in edges:
            yield declaration.of(problem)

    return edges_of


def past_half(dim: str, by: int = 1) -> Callable[[Mapping[str, int]], int]:
    """A size past the largest power of two that is below the size of ``dim``: 4097 for 5120 and for 8192.

    It is ``by`` more than a multiple of every shorter tile, and has the timed size's next power of two: its own tile.
    """
    return lambda shape: bucket(max(shape[dim] - 1, 0)) + by


def long_tail(dim: str) -> Callable[[Mapping[str, int]], int]:
    """A size of which every tile shorter than half of it leaves nearly a tile: 6128 for 5120 and for 8192.

    The largest of a row is then as likely to be in the tail as in any other tile.
    """
    return lambda shape: max(3 * bucket(max(shape[dim] - 1, 0)) // 2 - 16, 1)


def at_most(dim: str, size: int) -> Callable[[Mapping[str, int]], int]:
    """The timed size of ``dim``, but no more than ``size``: an edge is then large on a GPU, not on the interpreter."""
    return lambda shape: min(shape[dim], size)
