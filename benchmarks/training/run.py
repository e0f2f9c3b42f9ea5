"""One run: a model of one seed trained in one arm, to the same bits each time."""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first GEMM, whose bits vary else

import numpy
import torch
from torch import Tensor

from benchmarks.training.arms import in_transformers
from benchmarks.training.language import Language

HELD_OUT = 1_000_003  # seed of the texts that losses are judged on: no run's own
BALANCE = 0.01  # weight of the loss that spreads tokens over experts


@dataclass(frozen=True)
class Settings:
    """Settings that all runs of a comparison share."""

    steps: int = 1000
    sequences: int = 32
    length: int = 128
    vocabulary: int = 512
    topics: int = 8
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    experts: int = 8
    active: int = 2
    expert_width: int = 256
    lr: float = 2e-3
    warmup: int = 50
    held_out: int = 256  # texts that the final loss is a mean over

    @property
    def language(self) -> Language:
        """Language of all runs."""
        return Language(self.vocabulary, self.topics)


def make_model(settings: Settings, seed: int) -> Any:
    """Return a Qwen3-MoE of transformers with random weights, float32, on the CPU."""
    import transformers

    library: Any = transformers  # its annotations lack what its decorators add
    config = library.Qwen3MoeConfig(
        vocab_size=settings.language.tokens,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden // settings.heads,
        intermediate_size=settings.expert_width,
        moe_intermediate_size=settings.expert_width,
        num_experts=settings.experts,
        num_experts_per_tok=settings.active,
        norm_topk_prob=True,
        max_position_embeddings=settings.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = library.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


class Trainer:
    """A model of an arm and a seed with its optimizer on a device; there a step is captured in a CUDA graph."""

    def __init__(self, arm: str, seed: int, settings: Settings, device: str) -> None:
        self.arm, self.settings, self.device = arm, settings, torch.device(device)
        _be_deterministic(self.device)
        self.model = make_model(settings, seed).to(device)
        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.lr, self.loss = torch.zeros((), device=device), torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.lr,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
            capturable=self.device.type == "cuda",
        )
        self.text = torch.zeros(settings.sequences, settings.length + 1, dtype=torch.int64, device=device)
        self.once: Callable[[], None] = self._step
        if self.device.type == "cuda":
            self._capture()
        else:
            self._step()  # makes the optimizer's state
        self._reset(start)

    def step(self, text: Tensor, number: int) -> Tensor:
        """Return the loss of a step, (): a tensor that the next step writes over."""
        self.lr.fill_(self._rate(number))
        self.text.copy_(text)
        self.once()
        return self.loss

    @torch.no_grad()
    def held_out(self) -> float:
        """Return the mean loss on texts that no run has seen."""
        settings = self.settings
        texts = settings.language.texts(settings.held_out, settings.length, HELD_OUT, self.device)
        losses = [self._losses(part)[0] for part in texts.split(settings.sequences)]
        return statistics.fmean(torch.stack(losses).tolist())

    def digest(self) -> str:
        """Return a hash of all parameters' bytes."""
        sha256 = hashlib.sha256()
        for value in self.model.parameters():
            sha256.update(value.detach().cpu().numpy().tobytes())
        return sha256.hexdigest()

    @torch.no_grad()
    def _reset(self, start: list[Tensor]) -> None:
        """Undo warmup steps in the tensors that are there: a graph goes on reading those."""
        for parameter, value in zip(self.model.parameters(), start, strict=True):
            parameter.copy_(value)
            for moment in self.optimizer.state[parameter].values():
                moment.zero_()

    def _rate(self, number: int) -> float:
        """Return the learning rate: linear warmup, then linearly to a tenth."""
        settings = self.settings
        if number < settings.warmup:
            return settings.lr * (number + 1) / settings.warmup
        left = (settings.steps - number) / max(settings.steps - settings.warmup, 1)
        return settings.lr * (0.1 + 0.9 * max(left, 0.0))

    def _losses(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy of the tokens after a text's first, and the loss of balance."""
        with in_transformers(self.arm), torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            out = self.model.model(input_ids=text[:, :-1], output_router_logits=True)
            logits = self.model.lm_head(out.last_hidden_state[:, 1:]).float()
            balance = [_imbalance(layer, self.settings.active) for layer in out.router_logits]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 2:].flatten())
        return loss, torch.stack(balance).mean()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        loss, balance = self._losses(self.text)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are compiled and libraries take their memory outside of the graph
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.once = graph.replay


def _imbalance(logits: Tensor, active: int) -> Tensor:
    """Return E times the sum over experts of an expert's share, in tokens, times its mean probability.

    The least is 1, where they are equal (Fedus et al. 2021). The loss of transformers reads counts on the host, which a
    graph cannot. ``logits``: (tokens, E).
    """
    chances = logits.float().softmax(-1)
    chosen = chances.topk(active).indices.unsqueeze(-1) == torch.arange(logits.shape[-1], device=logits.device)
    return logits.shape[-1] * (chosen.float().mean((0, 1)) * chances.mean(0)).sum()


def run(arm: str, seed: int, settings: Settings, device: str, folder: Path) -> dict[str, Any]:
    """Train. The result is returned and written, and read if it is there."""
    file = folder / f"{arm}-{seed}.json"
    if file.exists():
        done: dict[str, Any] = json.loads(file.read_text())
        return done
    start = time.monotonic()
    trainer, losses = Trainer(arm, seed, settings, device), torch.zeros(settings.steps, device=device)
    count = settings.steps * settings.sequences
    texts = settings.language.texts(count, settings.length, seed, trainer.device).split(settings.sequences)
    for number in range(settings.steps):
        losses[number] = trainer.step(texts[number], number)
    results = {
        "arm": arm,
        "seed": seed,
        "losses": [round(loss, 5) for loss in losses.tolist()],
        "held_out": trainer.held_out(),
        "digest": trainer.digest(),
        "seconds": round(time.monotonic() - start, 1),
    }
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results))
    part.replace(file)  # there as a whole or not at all
    return results


def _be_deterministic(device: torch.device) -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a write less a tensor
    if device.type == "cuda":
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward pass adds in any order
        torch.backends.cuda.enable_cudnn_sdp(False)


def worker(arm: str, seed: int, settings: Settings, device: str, folder: str) -> dict[str, Any]:
    """Call :func:`run` in a process of a pool: other processes have the other cores."""
    torch.set_num_threads(1)
    return run(arm, seed, settings, device, Path(folder))
