"""The script of benchmarks/simulate_large.py; its arguments are the network and the number of layers.

transformer: 99e9 parameters with 54 layers. llama: an unmodified one of transformers, 101e9 with 64 layers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from msrun.runtime import AutoParallel, WithLoss, get_group_size, init, shard

WIDTH, HEADS, WORDS, LENGTH, TENSOR_PARALLEL = 12288, 96, 50304, 2048, 8


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        rows, length, width = x.shape
        y = self.first(x)
        q, k, v = (m(y).view(rows, length, HEADS, width // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(y)
        return x + self.down(gelu(self.up(self.second(x))))


class Llama(nn.Module):
    """Llama of transformers with the loss that it computes, a mask of padding and labels."""

    def __init__(self, layers: int) -> None:
        from figures import ROOT

        sys.path.insert(0, str(ROOT))
        from tests.zoo.packages import prepare_torchvision

        prepare_torchvision()
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.network = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=WIDTH,
                intermediate_size=32768,
                num_hidden_layers=layers,
                num_attention_heads=HEADS,
                num_key_value_heads=8,
                vocab_size=128256,
            )
        )

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; (batch, length) twice."""
        mask = (words != 0).long()
        loss: Tensor = self.network(input_ids=words, attention_mask=mask, labels=labels, use_cache=False).loss
        return loss


def build_transformer(layers: int, copies: int) -> nn.Module:
    """Return the network above with its loss."""
    blocks = [Block() for _ in range(layers)]
    for block in blocks:
        cut((block.q, block.k, block.v, block.up), (block.out, block.down), copies, has_bias=True)
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS), nn.Flatten(0, 1))
    return WithLoss(net, cross_entropy)


def build_llama(layers: int, copies: int) -> nn.Module:
    """Return Llama, cut as Megatron does."""
    net = Llama(layers)
    for layer in net.network.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        columns = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
        cut(columns, (attention.o_proj, mlp.down_proj), copies, has_bias=False)
    return net


def cut(columns: Sequence[nn.Module], rows: Sequence[nn.Module], copies: int, *, has_bias: bool) -> None:
    """Cut some layers by their outputs, others by their inputs."""
    for layer in columns:
        bias = ((TENSOR_PARALLEL,),) if has_bias else ()
        shard(layer, ((copies, 1, 1), (TENSOR_PARALLEL, 1), *bias))
    for layer in rows:
        bias = ((1,),) if has_bias else ()
        shard(layer, ((copies, 1, TENSOR_PARALLEL), (1, TENSOR_PARALLEL), *bias))


def main() -> None:
    """Build the network and call it once."""
    network, layers = sys.argv[1], int(sys.argv[2])
    init()
    torch.set_default_dtype(torch.bfloat16)
    copies = get_group_size() // TENSOR_PARALLEL
    net = (build_llama if network == "llama" else build_transformer)(layers, copies)
    print(f"{sum(parameter.numel() for parameter in net.parameters()) / 1e9:.1f}e9 parameters")
    optimizer = torch.optim.AdamW(net.parameters())
    words = torch.randint(WORDS, (1, LENGTH))
    labels = words if network == "llama" else words.flatten()
    step = AutoParallel(net).hsdp(shard_size=8).dataset_strategy(((copies, 1), (copies, *(1,) * (labels.dim() - 1))))
    step(words, labels).backward()
    optimizer.step()


if __name__ == "__main__":
    main()
