"""Comparison of results across compilers: where the machine code is the same, so is the time on the same GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fp8tune.records import Compiler, Device, KernelVersion, NamedInts, Pick, Problem, Program
from fp8tune.stats.study import Study


class Programs:
    """Machine code of launches by compiler, as the store has it."""

    def __init__(self, hashes: Mapping[Program, Mapping[Compiler, str]] = MappingProxyType({})) -> None:
        self._hashes: dict[tuple[Problem, str], dict[NamedInts, Mapping[Compiler, str]]] = {}
        for (problem, source_hash, config), by_compiler in hashes.items():
            self._hashes.setdefault((problem, source_hash), {})[config] = by_compiler

    def code_hash(self, problem: Problem, version: KernelVersion, config: NamedInts, device: Device) -> str:
        """Return the hash of a launch's machine code on a device; empty if it is not known."""
        return _by(device, self._hashes.get((problem, version.source_hash), {}).get(config, {}))

    def is_unchanged(self, pick: Pick | Study, device: Device) -> bool:
        """Return True if the compiler of a device makes the machine code that decided a pick.

        The pick and its runner-up must have the same code by both compilers, and so must each other config of the size
        that both are known to have compiled: the current config, the default and the rivals of a confirmation.
        """
        if pick.version is None:
            return False
        if isinstance(pick, Study):
            deciding = [pick.choice.pick, *([pick.next_best.config] if pick.next_best else [])]
        else:
            deciding = [config for config in (pick.config, pick.runner_up) if config is not None]
        known = self._hashes.get((pick.problem, pick.version.source_hash), {})
        pairs = {config: (_by(pick.device, hashes), _by(device, hashes)) for config, hashes in known.items()}
        both = {config: old == new for config, (old, new) in pairs.items() if old and new}
        return all(config in both for config in deciding) and all(both.values())


def is_same_gpu(first: Device, second: Device) -> bool:
    """Return True for the same GPU with the same software but Triton."""
    return replace(first, triton=second.triton, codegen=second.codegen) == second


def _by(device: Device, hashes: Mapping[Compiler, str]) -> str:
    """Return the hash by the compiler of a device; none if its assembler was replaced and the hashes differ."""
    place = device.arch, device.triton, device.codegen
    known = {code for compiler, code in hashes.items() if (compiler.arch, compiler.triton, compiler.codegen) == place}
    return known.pop() if len(known) == 1 else ""
