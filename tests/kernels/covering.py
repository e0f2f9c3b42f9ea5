"""A covering array: few cases in which every pair of values of any two factors occurs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering_array(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy and deterministic: each case starts from an uncovered pair and takes the values that cover most others."""
    missing = {
        ((one, i), (other, j)): None  # a dict keeps the order, a set would not
        for one, other in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    }
    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in factors:
            if name not in chosen:
                values = range(len(factors[name]))
                chosen[name] = max(values, key=lambda value, name=name: _gain((name, value), chosen, missing))
        for pair in itertools.combinations([(name, chosen[name]) for name in factors], 2):
            missing.pop(pair, None)
        cases.append({name: factors[name][chosen[name]] for name in factors})
    return cases


def _gain(item: tuple[str, int], chosen: Mapping[str, int], missing: Mapping[Pair, None]) -> int:
    return sum((item, other) in missing or (other, item) in missing for other in chosen.items())
