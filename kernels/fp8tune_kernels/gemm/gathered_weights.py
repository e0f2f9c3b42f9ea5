"""Weights of a module under FSDP2 that are quantized once after each all-gather, in memory that FSDP manages.

    quantize_after_all_gather(experts)      # before fully_shard
    fully_shard(experts, ...)

A parameter becomes a tensor subclass with the hooks that FSDP2 calls around an all-gather. The first makes the codes of
both passes beside the gathered weights and gives them to FSDP, which frees them with the weights and gives their memory
back before the next all-gather; later ones quantize into it. Nothing else tells that weights were gathered: FSDP writes
them where they were before, with the version that they had.

Between two all-gathers the codes are made once: for every micro-batch and each recomputation of a checkpoint. They take
2 bytes for each weight, as long as the weights are gathered. What an optimizer, a checkpoint or ``state_dict`` sees is
the shard as it was: copies and pickles of it are plain tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from ..catalog import RECIPES
from ..runtime.checks import IN_DTYPES, check_choice, fp8_dtype_for
from .grouped_tiles import are_multiples
from .quantized_weights import outputs_for, requantize_into


def quantize_after_all_gather(module: nn.Module, *, recipe: str = "default") -> list[str]:
    """Prepare the expert weights of a module and of those below it, before ``fully_shard``; returns their names.

    Expert weights are parameters (E, N, K), bfloat16, float16 or float32, with N and K multiples of 16, plain or
    DTensors. Others are left. ``recipe``: the one of ``fp8_grouped_mm`` that multiplies. Raises ValueError if there are
    no such parameters, and for another recipe.
    """
    from torch.distributed.tensor import DTensor

    check_choice("recipe", recipe, RECIPES)
    answer = []
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.dim() != 3 or parameter.dtype not in IN_DTYPES:
                continue
            data: Tensor = parameter.detach()
            local = data.to_local() if isinstance(data, DTensor) else data
            if not are_multiples(*local.shape[1:]):
                continue
            sharded: Tensor = ShardedWeights(local, recipe)
            if isinstance(data, DTensor):
                sharded = DTensor.from_local(
                    sharded, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
                )
            setattr(owner, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
            answer.append(f"{prefix}.{name}" if prefix else name)
    if not answer:
        raise ValueError("module has no parameter (E, N, K) with N and K multiples of 16: nothing to quantize")
    return answer


class Multipliable(NamedTuple):
    """Gathered weights as ``fp8_grouped_mm`` takes what is quantized."""

    weights: Tensor
    """(E, K, N): gradients reach the parameter."""
    codes: tuple[Tensor, ...]
    float8_dtype: torch.dtype
    recipe: str


def multipliable(weights: Tensor) -> Any:
    """Return what ``fp8_grouped_mm`` takes as ``B_t`` of weights (E, N, K), with codes where they were gathered.

    Raises RuntimeError if gathered weights have changed in place since.
    """
    if not isinstance(weights, GatheredWeights):
        return weights.transpose(1, 2)
    made = weights.made
    if weights._version != made.version:
        raise RuntimeError("the weights were changed in place after they were gathered: change the shards, and reshard")
    return Multipliable(weights.transpose(1, 2), made.codes, made.codes[0].dtype, made.recipe)


class Made:
    """The codes of gathered weights, which all tensors that stand for those share."""

    def __init__(self, weights: Tensor, recipe: str) -> None:
        self.recipe = recipe
        self.codes = outputs_for(recipe, weights.transpose(1, 2), fp8_dtype_for(weights.device, None))
        self.requantize(weights)

    @torch.no_grad()
    def requantize(self, weights: Tensor) -> None:
        """Quantize weights (E, N, K) that were just gathered. A backward pass may have saved the codes: of the same."""
        self.version = weights._version
        with _unsafe_preserve_version_counter(self.codes):
            requantize_into(self.recipe, weights.detach().as_subclass(Tensor).transpose(1, 2), self.codes)


class GatheredWeights(Tensor):
    """All weights (E, N, K), as a module has them between an all-gather and the next reshard, and their codes.

    Anything computed from it is a plain tensor.
    """

    made: Made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """FSDP, ``nn.Parameter`` and ``DTensor.to_local`` make other tensors of the same weights."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("as_strided", "detach", "view_as") and isinstance(args[0], cls):
            return _with(result, args[0].made)
        return result


def _with(weights: Tensor, made: Made) -> GatheredWeights:
    gathered = weights.as_subclass(GatheredWeights)
    gathered.made = made
    return gathered


_KEPT = {
    getattr(torch.ops.aten, name).default
    for name in ("empty_like", "new_zeros", "copy_", "view", "as_strided", "_to_copy", "_pin_memory", "clone", "detach")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor, torch.ops.c10d.scatter_.default}
"""What FSDP, ``to_empty`` and ``distribute_tensor`` make of a parameter: shards have to be of the class."""


class ShardedWeights(Tensor):
    """A parameter's shard with the hooks of FSDP2; the values are in ``data_of_shard``."""

    data_of_shard: Tensor
    recipe: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, recipe: str) -> ShardedWeights:
        """A tensor without memory of its own."""
        memory: Any = {
            "strides": data.stride(),
            "storage_offset": data.storage_offset(),
            "pin_memory": data.is_pinned(),
        }
        kind: Any = {name: getattr(data, name) for name in ("dtype", "layout", "device", "requires_grad")}
        made: ShardedWeights = Tensor._make_wrapper_subclass(cls, data.size(), **memory, **kind)
        made.data_of_shard, made.recipe = data, recipe
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation is that of the values."""
        plain = pytree.tree_map_only(ShardedWeights, lambda item: item.data_of_shard, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if func not in _KEPT:
            return result
        recipe = next(item.recipe for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, ShardedWeights))
        return pytree.tree_map_only(Tensor, lambda item: ShardedWeights(item, recipe), result)

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["data_of_shard"], self.recipe

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], recipe: str, *_: Any) -> ShardedWeights:
        return cls(inner["data_of_shard"], recipe)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data_of_shard.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeights({self.data_of_shard!r})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], torch.Size]:
        """The shard in the dtype that is gathered, padded to as many experts as the first rank has."""
        data = self.data_of_shard
        if data.shape[1:] == outer_size[1:]:
            share = -(-outer_size[0] // mesh.size())
            if missing := share - data.shape[0]:
                data = nn.functional.pad(data, (0, 0, 0, 0, 0, missing))
        return (data.to(mp_policy.param_dtype or data.dtype),), outer_size

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], size: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weights with their codes; later, with ``out``, its codes anew."""
        weights = outputs[0].view(-1)[: size.numel()].view(size)
        if out is None:
            made = Made(weights, self.recipe)
            return _with(weights, made), made.codes
        local = getattr(out, "_local_tensor", out)
        assert isinstance(local, GatheredWeights)
        local.made.requantize(local)
        return None
