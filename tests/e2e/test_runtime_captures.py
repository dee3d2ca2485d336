"""Captures: batches of other sizes, torch.compile outside, dataclasses as batches, mistakes of the user."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from on_ranks import on_ranks
from torch import nn

from msrun.errors import CaptureError
from msrun.runtime import AutoParallel, GradAccumulation, MicroBatchInterleaved, Pipeline, shard

WIDTH, HEADS, WORDS, LONGEST = 8, 2, 12, 24
SIZES = ((8, 6), (8, 8), (8, 5), (4, 12), (8, 7), (4, 9), (8, 8), (12, 10))
"""Rows and tokens of each step."""
two_ranks = on_ranks(2, dtype="float64")
pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)[:, :-1] / words.shape[1] ** 0.5
        return F.cross_entropy(scores.reshape(-1, WORDS), words[:, 1:].reshape(-1))


def cut(network):
    for block in network.blocks:
        shard(block.up, ((1, 1, 1), (2, 1)))
        shard(block.down, ((1, 1, 2), (1, 2)))
    return network


MODES = {
    "data parallel": AutoParallel,
    "tensor parallel": lambda network: AutoParallel(cut(network)).dataset_strategy("full_batch"),
    "auto": lambda network: AutoParallel(network, "auto"),
    "hsdp": lambda network: AutoParallel(network).hsdp(threshold=0, optimizer_level="level3"),
    "copies": lambda network: AutoParallel(MicroBatchInterleaved(network, 2)),
    "accumulation": lambda network: AutoParallel(GradAccumulation(network, 2)),
    "pipeline": lambda network: AutoParallel(Pipeline(network, 2)).pipeline(2).dataset_strategy("full_batch"),
}


@two_ranks
@pytest.mark.parametrize("mode", MODES)
def test_every_length_trains_as_in_one_process_and_the_code_is_followed_thrice(ranks, mode):
    network, right = Language(), Language()
    step = MODES[mode](network)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (network, right))
    is_whole = mode in ("tensor parallel", "pipeline")
    for number, (rows, tokens) in enumerate(SIZES):
        batch = torch.randint(0, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(number))
        loss, expected = step(batch if is_whole else ranks.part(batch)), right(batch)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=0)
        for each, found in ((other, expected), (optimizer, loss)):
            found.backward()
            each.step()
            each.zero_grad()
    assert step.captures == 3  # the first sizes; then free tokens; then free rows, too
    assert "may have any size in dimension" in step.plan.explain()


@two_ranks
def test_what_depends_on_a_size_is_captured_again_and_says_so(ranks):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x):
            return self.layer(x).mean() * (2 if x.shape[1] > 8 else 3)

    network, right = Branch(), Branch()
    step = AutoParallel(network)
    told = []
    for tokens in (3, 4, 5, 9, 10, 11, 6):
        x = torch.randn(4, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(step(ranks.part(x)).detach(), right(x).detach(), rtol=1e-10, atol=0)
        told.append("captured again" in step.plan.explain())
    assert step.captures == 3
    assert told[:4] == [False, False, False, True]


@two_ranks
def test_a_frozen_weight_or_another_value_is_seen_at_a_new_length(ranks):
    network, right = Language(), Language()
    network.scale = right.scale = 1
    step = AutoParallel(network)
    for tokens, is_trained in ((4, True), (5, True), (6, False), (7, False), (8, True)):
        for each in (network, right):
            each.head.weight.requires_grad_(is_trained)
            each.zero_grad()
        batch = torch.randint(0, WORDS, (4, tokens), generator=torch.Generator().manual_seed(tokens))
        step(ranks.part(batch)).backward()
        right(batch).backward()
        for mine, other in zip(network.parameters(), right.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


@two_ranks
def test_batches_of_other_lengths_are_told_with_both_shapes_and_what_to_do(ranks):
    with pytest.raises(CaptureError) as error:
        AutoParallel(nn.Linear(8, 4))(torch.ones(3 + ranks.rank, 8))
    assert "rank 1 got a batch of 4x8, rank 0 a batch of 3x8" in str(error.value)
    assert "give every rank batches of one shape (pad to one length, drop the last, smaller one)" in str(error.value)


class Halved(nn.Module):
    """Writes into `flatten` of what a convolution makes: a view of it, or, of channels_last, a copy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.weight = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        made = self.conv(x)
        made.flatten(1)[:, ::2].mul_(0.5)
        scaled = x * self.weight
        scaled.flatten(1)[:, ::2].mul_(0.5)
        return made.square().mean() + scaled.square().mean()


@two_ranks
@pytest.mark.parametrize("of_weights", [torch.contiguous_format, torch.channels_last])
def test_write_goes_where_the_order_of_memory_lets_it_go(ranks, of_weights):
    net = Halved().to(memory_format=of_weights)
    images = torch.randn(8, 4, 6, 6)
    batches = [images, images.contiguous(memory_format=torch.channels_last), images]
    right = [net(batch).item() for batch in batches]
    step = AutoParallel(net).dataset_strategy("full_batch")
    assert [step(batch).item() for batch in batches] == pytest.approx(right, rel=1e-12)
