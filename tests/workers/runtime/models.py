"""Trains, evaluates, calls and saves a model of transformers: cut by a plan by names under msrun, else in plain torch.

usage: models.py MODEL FOLDER. Numbers go to FOLDER/cut.json or FOLDER/plain.json; the cut model is saved in FOLDER, and
the plain run loads it and adds what it gives.
"""

import copy
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

import transformers  # noqa: E402

WORDS, WIDTH, STEPS = 64, 32, 20
LENGTHS = (6, 9, 7, 12, 6)
_DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": WORDS,
}
_ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
_WHISPER = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_target_positions", "vocab_size"), 64),
    "num_mel_bins": 8,
    "d_model": WIDTH,
    "max_source_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_LAYERS = {"*.[qkv]_proj": "colwise", "*.fc1": "colwise", "*.fc2": "rowwise"}
MODELS = {
    "GPT-2": (
        "GPT2LMHeadModel",
        {**_GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
        {"h.*.mlp.c_fc": "colwise", "h.*.c_proj": "rowwise", "wte": "vocab"},
    ),
    "Llama": ("LlamaForCausalLM", _DECODER, None),
    "Qwen3": ("Qwen3ForCausalLM", _DECODER, None),
    "Mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}, None),
    "BERT": (
        "BertForMaskedLM",
        {**_ENCODER, "max_position_embeddings": 64, "vocab_size": WORDS},
        {
            "layer.*.query": "colwise",
            "layer.*.key": "colwise",
            "layer.*.value": "colwise",
            "layer.*.intermediate.dense": "colwise",
            "layer.*.output.dense": "rowwise",
            "word_embeddings": "vocab",
        },
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {**_T5, "dropout_rate": 0, "decoder_start_token_id": 0},
        {"*Attention.[qkv]": "colwise", "*Attention.o": "rowwise", "*.wi": "colwise", "*.wo": "rowwise"},
    ),
    "ViT": (
        "ViTForImageClassification",
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 10},
        {**_LAYERS, "*.o_proj": "rowwise"},
    ),
    "Whisper": ("WhisperForConditionalGeneration", _WHISPER, {**_LAYERS, "*.out_proj": "rowwise"}),
}
"""Name -> class, words of its configuration, plan; None: the one that the model brings."""
WITHOUT_WORDS = ("BERT", "ViT")
"""Models that generate nothing."""


def batch(name, number, rows=4):
    """Return the arguments of a call, of a length of its own."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, WORDS, (rows, LENGTHS[number % len(LENGTHS)]), generator=generator)
    if name == "ViT":
        rows += 2 * (number % 2)
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator), "labels": torch.arange(rows) % 10}
    if name == "Whisper":
        return {"input_features": torch.randn(rows, 8, 32, generator=generator), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.flip(1) if name in ("T5", "BERT") else tokens}


class Run:
    """A network and its step, which are one in plain torch, and what one does with them."""

    def __init__(self, name, net, step):
        self.name, self.net, self.step = name, net, step
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def inputs(self, number, rows):
        """Return arguments for logits; those with a decoder need labels too."""
        given = batch(self.name, number, rows)
        return given if self.name in ("T5", "Whisper") else {k: v for k, v in given.items() if k != "labels"}

    def train(self):
        """Train 20 steps whose lengths change."""
        losses = []
        self.step.train()
        for number in range(STEPS):
            loss = self.step(**batch(self.name, number)).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def outside(self, net=None):
        """Evaluate at another size, and call the network and a part of it without its step."""
        net = self.net if net is None else net
        step = self.step if net is self.net else net
        step.eval()
        part = net.get_encoder() if self.name in ("T5", "Whisper") else net.base_model
        words = {key: value for key, value in batch(self.name, 97, 2).items() if key != "labels"}
        found = {}
        with torch.no_grad():
            found["evaluated"] = step(**batch(self.name, 99, 6)).loss.item()
            found["logits"] = net(**self.inputs(98, 3)).logits.flatten().tolist()
            found["part"] = part(**words)[0].flatten().tolist()
            state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
            found["functional"] = torch.func.functional_call(net, state, (), self.inputs(94, 2)).logits.sum().item()
        if self.name not in WITHOUT_WORDS:
            many: Callable[..., Any]
            for many in (net.generate, step.generate):
                tokens = many(**words, max_new_tokens=20, min_new_tokens=20, do_sample=False).tolist()
                assert found.setdefault("tokens", tokens) == tokens
        return found

    def second_loss(self):
        """Take the gradients of another loss, outside of the step."""
        loss = self.net(**self.inputs(96, 4)).logits.square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1e9).item()
        self.optimizer.zero_grad()
        return [loss.item(), norm]

    def all(self):
        """Do everything that a network is used for."""
        found = {"trained": self.train(), "outside": self.outside(), "second loss": self.second_loss()}
        hooked = []
        handle = self.net.base_model.register_forward_hook(lambda *_: hooked.append(1))
        other = copy.deepcopy(self.net)
        found["copied"] = other.eval()(**self.inputs(93, 2)).logits.sum().item()
        assert hooked
        handle.remove()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        kept = {key: value.clone() for key, value in self.step.state_dict().items()}
        found["state"] = {key: value.double().square().sum().item() for key, value in kept.items()}
        self.step.load_state_dict({key: value * 0.5 for key, value in kept.items()})
        found["halved"] = self.step(**batch(self.name, 92)).loss.item()
        self.net.load_state_dict(kept)
        found["trained again"] = self.train()
        return found


def main():
    name, folder = sys.argv[1], Path(sys.argv[2])
    kind, words, plan = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    net = kind(kind.config_class(**words))
    if "RANK" not in os.environ:
        run = Run(name, net, net)
        found = {**run.all(), "at last": run.outside()}
        loaded = run.outside(kind.from_pretrained(folder / "saved"))
        Path(folder, "plain.json").write_text(json.dumps(found))
        Path(folder, "loaded.json").write_text(json.dumps(loaded))
        return
    from msrun.runtime import AutoParallel, get_rank, init, parallelize

    init()
    step = AutoParallel(parallelize(net, plan)).dataset_strategy("full_batch")
    assert isinstance(step, kind)
    run = Run(name, net, step)
    found = {**run.all(), "at last": run.outside()}
    step.save_pretrained(folder / "saved")
    if get_rank() == 0:
        Path(folder, "cut.json").write_text(json.dumps(found))


main()
