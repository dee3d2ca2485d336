"""Trains a GPT-2 by the loop of another library, 20 steps: cut under msrun, else in one process.

usage: integrations.py LIBRARY FOLDER; the losses go to FOLDER/cut.json or FOLDER/plain.json
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from zoo.packages import prepare_torchvision

prepare_torchvision()

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

IS_CUT = "RANK" in os.environ
STEPS, ROWS, RANKS = 20, 4, 2 if IS_CUT else 1
PLAN = {"h.*.mlp.c_fc": "colwise", "h.*.c_proj": "rowwise", "wte": "vocab"}
_WORDS = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
TOKENS = torch.randint(3, 64, (STEPS * ROWS, 12), generator=torch.Generator().manual_seed(1))
DATA: Any = [{"input_ids": row, "labels": row} for row in TOKENS]


def cut(net: Any, plan: dict[str, str]) -> Any:
    """Return the step of a network; in one process the network."""
    if not IS_CUT:
        return net
    from msrun.runtime import AutoParallel, parallelize

    return AutoParallel(parallelize(net, plan))


def loop(
    step: Any, optimizer: Any, backward: Callable[[Any], Any], clip: Callable[[], Any], loader: Any
) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for words in loader:
        loss = step(**words).loss
        backward(loss)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accelerate(net: Any, folder: Path) -> list[float]:
    """`Accelerator.prepare` of step, optimizer and loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(DATA, batch_size=ROWS // RANKS)
    step, optimizer, loader = accelerator.prepare(cut(net, PLAN), torch.optim.AdamW(net.parameters(), lr=1e-3), loader)
    losses = loop(
        step, optimizer, accelerator.backward, lambda: accelerator.clip_grad_norm_(step.parameters(), 1.0), loader
    )
    accelerator.save_model(step, folder / "saved")
    return losses


def trainer(net: Any, folder: Path) -> list[float]:
    """transformers' Trainer."""
    net.loss_type = "ForCausalLM"  # else Trainer counts a label too many for each row in one process
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=ROWS // RANKS,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    step = cut(net, PLAN)
    trained = Trainer(model=step, args=arguments, train_dataset=DATA)
    trained.train()
    if IS_CUT:
        step.save_pretrained(folder / "saved")
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def fabric(net: Any, folder: Path) -> list[float]:
    """Lightning's Fabric, whose ModelParallelStrategy asks for a function that cuts the network."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda module, _: cut(module, PLAN), RANKS, 1) if IS_CUT else "auto"
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    step = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(step.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(DATA, batch_size=ROWS // RANKS))
    return loop(step, optimizer, fabric.backward, lambda: fabric.clip_gradients(step, optimizer, max_norm=1.0), loader)


def peft(net: Any, folder: Path) -> list[float]:
    """PEFT's LoRA adapters beside cut layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = get_peft_model(net, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    step = cut(lora, {"h.*.mlp.c_fc.base_layer": "colwise", "h.*.c_proj": "rowwise"})
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=1e-2)
    rank = int(os.environ.get("RANK", 0))
    rows = ({"input_ids": part, "labels": part} for each in TOKENS.split(ROWS) for part in [each.chunk(RANKS)[rank]])
    losses = loop(step, optimizer, lambda loss: loss.backward(), lambda: None, rows)
    step.save_pretrained(folder / "saved")
    return losses


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[2])
    if IS_CUT:
        from msrun.runtime import init

        init()
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(**_WORDS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, eos_token_id=2))
    losses = globals()[library](net, folder)
    if os.environ.get("RANK", "0") == "0":
        Path(folder, "cut.json" if IS_CUT else "plain.json").write_text(json.dumps(losses))


main()
