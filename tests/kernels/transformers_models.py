"""Small models of transformers, and how far their steps differ from bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

COMMON = {
    **{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 128, "max_position_embeddings": 4096, "eos_token_id": None},
}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3-moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 8, "head_dim": 16},
    ),
    "mixtral": ("Mixtral", {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss-20b": (
        "GptOss",
        {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 16},
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 8}),
}


def made(name: str) -> Any:
    """Return a model in bfloat16. The spread of weights lets experts matter beside the residual stream."""
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**COMMON, **sizes))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if label.endswith("proj_bias"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 3:
                parameter.normal_(0, parameter.shape[1 if "gpt" in name else 2] ** -0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model.train()


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(torch.cosine_similarity(joined(a), joined(b), dim=0))


def error(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the norm of the difference over that of ``b``."""
    return float((joined(a) - joined(b)).norm() / joined(b).norm())


class Differences:
    """Logits and gradients of bfloat16 (``grouped_mm`` of transformers), and how far others are from them."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.right = self._step("grouped_mm")

    def _step(self, implementation: str) -> tuple[Tensor, list[Tensor]]:
        self.model.set_experts_implementation(implementation)
        self.model.zero_grad(set_to_none=True)
        out = self.model(input_ids=self.ids, labels=self.ids)
        out.loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return out.logits, gradients

    def measures(self, implementation: str) -> dict[str, float]:
        """Return relative errors, and cosines of all gradients and the least of any expert weight's."""
        (logits, gradients), (right, right_gradients) = self._step(implementation), self.right
        pairs = zip(gradients, right_gradients, strict=True)
        return {
            "logits_error": error([logits], [right]),
            "gradient_error": error(gradients, right_gradients),
            "gradient_cosine": cosine(gradients, right_gradients),
            "expert_cosine": min(cosine([a], [b]) for a, b in pairs if a.dim() == 3),
        }
