"""Eight steps by DeepSpeed on a CPU, without and with weights once: prints the losses, and a change inside a block.

python deepspeed_steps.py STAGE
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

import deepspeed
import torch

from benchmarks.real.transformers_steps import made
from fp8tune_kernels.transformers_experts import use_fp8_experts, weights_once


def engine_of(stage: int) -> Any:
    model = made("qwen3-moe", "cpu", small=True)
    use_fp8_experts(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, is_once: bool, *, is_step_inside: bool = False) -> list[float]:
    losses = []
    for batch in range(8):
        with contextlib.ExitStack() as block:
            if is_once:
                block.enter_context(weights_once(engine))
            for micro in range(2):
                if micro and not is_step_inside:
                    engine.step()  # of the first micro-batch: it changes nothing
                generator = torch.Generator().manual_seed(batch % 2 * 2 + micro)
                ids = torch.randint(128, (2, 48), generator=generator)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                losses.append(loss.item())
                if is_step_inside:
                    engine.step()
        if not is_step_inside:
            engine.step()
    return losses


def main(stage: int) -> None:
    """Print a line for each run, after RESULT."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
        if stage < 3:
            for is_once in (False, True):
                print("RESULT", train(engine_of(stage), is_once))
        try:
            print("RESULT", train(engine_of(stage), True, is_step_inside=True))
        except RuntimeError as error:
            print("RESULT", error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
