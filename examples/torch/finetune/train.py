"""A GPT-2 of transformers, fine-tuned with a plan by names: tensor parallel, batches of changing length.

Start with `bash run.sh [MODEL] [TEXT]`. MODEL is a folder with a GPT-2 as `save_pretrained` writes it, and its
tokenizer; without it the program makes a small one and reads letters. TEXT is a text file; without it, this program.
One process gives the same losses: `python train.py`.
"""

import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from msrun.runtime import AutoParallel, get_rank, init, parallelize, release

init()
torch.manual_seed(1)
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

text = Path(os.getenv("TEXT") or __file__).read_text(encoding="utf-8")
if folder := os.getenv("MODEL"):
    tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    net = AutoModelForCausalLM.from_pretrained(folder, **NO_DROPOUT)
else:
    tokens = torch.tensor([min(ord(letter), 127) for letter in text])
    sizes = {"vocab_size": 128, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **NO_DROPOUT))
net.config.use_cache = False

parallelize(
    net,
    {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
)


class NextToken(nn.Module):
    """The mean loss of the next token."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids):
        scores = self.net(ids).logits[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


model = AutoParallel(NextToken(net)).dataset_strategy("full_batch")
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

draw = torch.Generator().manual_seed(2)
for step in range(int(os.getenv("STEPS", "60"))):
    length = 32 + 8 * (step % 4)  # a new length costs no new capture after the second
    begins = torch.randint(len(tokens) - length, (8,), generator=draw)
    loss = model(torch.stack([tokens[begin : begin + length] for begin in begins.tolist()]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step: {step}, loss is {loss.item()}")

if get_rank() == 0:
    print(model.plan.summary())
release()
