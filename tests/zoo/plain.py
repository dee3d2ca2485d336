"""Models as people write them with torch alone."""

import math
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun.runtime import WithLoss, clip_grad_norm_
from zoo.entry import ROWS, Entry, cut, momentum, tokens

VOCABULARY = 64
WIDTH = 32
LENGTH = 12
TABLES = 3
PER_BAG = 4


class UNet(nn.Module):
    """Ronneberger et al. 2015, with batch norm, two levels deep."""

    def __init__(self, width=8, classes=4):
        super().__init__()
        self.down1 = self._block(3, width)
        self.down2 = self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = self._block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(before, after):
        layers = []
        for inwards in (before, after):
            layers += [nn.Conv2d(inwards, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
            layers += [nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x):
        """Return the scores of every pixel's classes."""
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([second, self.up2(x)], dim=1))
        x = self.join1(torch.cat([first, self.up1(x)], dim=1))
        return self.head(x)


class VAE(nn.Module):
    """A convolutional variational auto-encoder that draws its code in forward, and its loss."""

    def __init__(self, width=8, code=6):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 2 * code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * width * 16),
            nn.Unflatten(1, (2 * width, 4, 4)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        """Return the negative evidence bound of images of values in [0, 1]."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        likelihood = F.binary_cross_entropy_with_logits(self.decoder(code), x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return (likelihood + divergence) / x.shape[0]


class Translator(nn.Module):
    """nn.Transformer, with the mask of its targets made in forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, target):
        """Return the loss of every next token of the target."""
        before, after = target[:, :-1], target[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(before.shape[1], device=before.device)
        hidden = self.transformer(self.embedding(source), self.embedding(before), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), after.flatten())


class LSTM(nn.Module):
    """A language model of two layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, labels):
        """Return the loss of the labels."""
        hidden, _ = self.lstm(self.embedding(x))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class DLRM(nn.Module):
    """Naumov et al. 2019: dense features and bags of categories, products of all pairs, and a click to predict."""

    def __init__(self, width=8, dense=5, categories=40):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList([nn.EmbeddingBag(categories, width, mode="sum") for _ in range(TABLES)])
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(TABLES + 1, TABLES + 1, -1))

    def forward(self, dense, bags):
        """Return the score of a click; `bags` is (rows, tables, ids per bag)."""
        x = self.bottom(dense)
        features = torch.stack([x, *(table(bags[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(1)


class GPTBlock(nn.Module):
    """Attention in one fused projection, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return (rows, length, width)."""
        rows, length, width = x.shape
        heads = (
            part.view(rows, length, 4, width // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([GPTBlock(), GPTBlock()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:
            nn.init.normal_(block.down.weight, std=0.02 / math.sqrt(4))
        self.head.weight = self.tokens.weight

    def forward(self, x, labels):
        """Return the loss of the labels."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _gpt_update(network):
    """Return a step with weight decay for matrices only, clipping, and a rate that falls as a cosine."""
    matrices = [parameter for parameter in network.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # Adam's steps would not show a wrong norm
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def update():
        clip_grad_norm_(network.parameters(), 0.3)
        optimizer.step()
        schedule.step()

    return update


def _pixels(generator):
    return (torch.randn(ROWS, 3, 16, 16, generator=generator), torch.randint(4, (ROWS, 16, 16), generator=generator))


def _digits(generator):
    return (torch.rand(ROWS, 1, 16, 16, generator=generator),)


def _clicks(generator):
    return (
        torch.randn(ROWS, 5, generator=generator),
        torch.randint(40, (ROWS, TABLES, PER_BAG), generator=generator),
        torch.randint(2, (ROWS,), generator=generator).float(),
    )


_language = partial(Entry, batch=tokens(VOCABULARY, LENGTH))

ENTRIES = [
    Entry(
        "UNet",
        lambda: WithLoss(UNet(), F.cross_entropy),
        _pixels,
        is_float64=True,
        normalises_batch=True,
        cut=cut(channels=("down2.0", "middle.0")),
    ),
    Entry(
        "VAE",
        VAE,
        _digits,
        is_float64=True,
        draws=True,
        optimizer=partial(momentum, lr=0.01),
        cut=cut(channels=("encoder.0",), columns=("decoder.0",), dims=2),
    ),
    _language("nn.Transformer", Translator, draws=True, cut=cut(columns=("linear1",), inputs=("linear2",))),
    _language("LSTM", LSTM, optimizer=partial(momentum, lr=1.0), cut=cut(columns=("head",))),
    Entry(
        "DLRM",
        lambda: WithLoss(DLRM(), F.binary_cross_entropy_with_logits),
        _clicks,
        cut=cut(columns=("top.0",), inputs=("top.2",), dims=2),
    ),
    _language("GPT, tied weights", GPT, optimizer=_gpt_update, cut=cut(columns=("qkv", "up"), inputs=("out", "down"))),
]
