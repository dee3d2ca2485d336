"""Trains a GPT-2 by the loop of another library, 20 steps: cut under msrun, else in one process.

usage: integrations.py LIBRARY FOLDER; the losses go to FOLDER/cut.json or FOLDER/plain.json, and the last two are those
of the trained model: as it is, and as plain transformers loads what the cut one has saved
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))
from zoo.packages import prepare_torchvision

prepare_torchvision()

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

IS_CUT = "RANK" in os.environ
RANK = int(os.environ.get("RANK", "0"))
STEPS, ROWS, RANKS = 20, 4, 2 if IS_CUT else 1
PLAN = {"h.*.mlp.c_fc": "colwise", "h.*.c_proj": "rowwise", "wte": "vocab"}
_WORDS = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
TOKENS = torch.randint(3, 64, (STEPS * ROWS, 12), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


def cut(net, plan):
    """Return the step of a network; in one process the network."""
    if not IS_CUT:
        return net
    from msrun.runtime import AutoParallel, parallelize

    return AutoParallel(parallelize(net, plan))


def loop(step, optimizer, backward, clip, loader):
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


def accelerate(net, folder):
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


def trainer(net, folder):
    """transformers' Trainer, which saves half of the way and goes on from there."""
    net.loss_type = "ForCausalLM"  # else Trainer counts a label too many for each row in one process
    step = cut(net, PLAN)

    class WholeTrainer(Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            if IS_CUT:
                self.model.save_pretrained(output_dir or self.args.output_dir)
            else:
                super().save_model(output_dir, _internal_call)

    where = folder / f"trainer_{IS_CUT}"
    arguments = TrainingArguments(
        str(where),
        per_device_train_batch_size=ROWS // RANKS,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=STEPS // 2,
        save_only_model=True,
        report_to=[],
        use_cpu=True,
    )
    losses = []
    for checkpoint in (None, str(where / f"checkpoint-{STEPS // 2}")):
        trained = WholeTrainer(model=step, args=arguments, train_dataset=DATA)
        trained.train(resume_from_checkpoint=checkpoint)
        losses += [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    trained.save_model(str(folder / "saved" if IS_CUT else where))
    return losses


def lightning(net, folder):
    """Lightning's Trainer, with a sampler of the user's: its own shuffles."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses = []

    class Module(LightningModule):
        def configure_model(self):
            self.step = cut(net, PLAN)

        def training_step(self, words, _):
            loss = self.step(**words).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.step.parameters(), lr=1e-3)

    module = Module()
    sampler = DistributedSampler(DATA, RANKS, RANK, shuffle=False)
    Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=ModelParallelStrategy(RANKS, 1) if IS_CUT else "auto",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=folder,
    ).fit(module, torch.utils.data.DataLoader(DATA, ROWS // RANKS, sampler=sampler))
    if IS_CUT:
        module.step.save_pretrained(folder / "saved")
    return losses


def fabric(net, folder):
    """Lightning's Fabric, whose ModelParallelStrategy asks for a function that cuts the network."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda module, _: cut(module, PLAN), RANKS, 1) if IS_CUT else "auto"
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    step = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(step.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(DATA, batch_size=ROWS // RANKS))
    losses = loop(
        step, optimizer, fabric.backward, lambda: fabric.clip_gradients(step, optimizer, max_norm=1.0), loader
    )
    if IS_CUT:
        from msrun.runtime import whole_parameters

        with whole_parameters(net):
            net.save_pretrained(folder / "saved", is_main_process=RANK == 0)
    return losses


def peft(net, folder):
    """PEFT's LoRA adapters beside cut layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = get_peft_model(net, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    step = cut(lora, {"h.*.mlp.c_fc.base_layer": "colwise", "h.*.c_proj": "rowwise"})
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=1e-2)
    rows = ({"input_ids": part, "labels": part} for each in TOKENS.split(ROWS) for part in [each.chunk(RANKS)[RANK]])
    losses = loop(step, optimizer, lambda loss: loss.backward(), lambda: None, rows)
    if IS_CUT:
        step.save_pretrained(folder / "saved")
    return losses


def final_loss(net):
    """Return the loss of some rows; whole weights are gathered where they are cut."""
    with torch.no_grad():
        return float(net.eval()(input_ids=TOKENS[:ROWS], labels=TOKENS[:ROWS]).loss)


def loaded(library, config, folder):
    """Return what plain transformers makes of the file."""
    if library == "accelerate":  # writes no configuration
        net = GPT2LMHeadModel(config)
        load_model(net, folder / "saved" / "model.safetensors")
        return net
    if library != "peft":
        return GPT2LMHeadModel.from_pretrained(folder / "saved", config=config)
    from peft import PeftModel

    torch.manual_seed(0)
    return PeftModel.from_pretrained(GPT2LMHeadModel(config), folder / "saved")


def main():
    library, folder = sys.argv[1], Path(sys.argv[2])
    if IS_CUT:
        from msrun.runtime import init

        init()
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(**_WORDS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, eos_token_id=2))
    losses = globals()[library](net, folder)
    losses.append(final_loss(net))
    losses.append(losses[-1] if IS_CUT else final_loss(loaded(library, net.config, folder)))
    if RANK == 0:
        Path(folder, "cut.json" if IS_CUT else "plain.json").write_text(json.dumps(losses))


main()
