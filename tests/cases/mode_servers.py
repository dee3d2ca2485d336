"""Training with parameters on parameter servers, compared with one process on the global batch, in float64."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.runtime import (
    AutoParallel,
    EmbeddingLookup,
    clip_grad_norm_,
    get_group_size,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    optim,
    save_checkpoint,
    set_param_ps,
    set_ps_context,
    value_and_grad,
)
from msrun.server import remote
from msrun.server.connection import _open_all

ROWS, STEPS, BATCH = 41, 6, 8
STALENESS, STALE_STEPS = 3, 12


class Network(nn.Module):
    """A table with a padding row, a weight that is cut, small parameters that are not, and one without dimensions."""

    def __init__(self, *, sparse=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(ROWS, 6, padding_idx=3, sparse=sparse)
        self.wide = nn.Linear(6, 1500)
        self.narrow = nn.Linear(1500, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, rows, labels):
        hidden = functional.tanh(self.wide(self.table(rows).mean(1)))
        return functional.cross_entropy(self.narrow(hidden) * self.scale, labels)


def batches(steps=STEPS, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, ROWS // (1 + step % 2), (BATCH, 4), generator=generator)
        yield rows, torch.randint(0, 3, (BATCH,), generator=generator)


def mine(tensor):
    return tensor.chunk(get_group_size())[get_rank()]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "momentum": lambda parameters: optim.Momentum(parameters, 0.1, 0.9, weight_decay=0.01),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.02),
    "mindspore adam": lambda parameters: optim.Adam(parameters, lr=0.02, eps=1e-2, use_eps_hat=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "ftrl": lambda parameters: optim.FTRL(parameters, lr=0.1, l1=1e-3),
    "lazy": lambda parameters: optim.LazyAdam(parameters, lr=0.02),
}


class Run:
    """A network, its optimizer, and a learning rate that falls."""

    def __init__(self, kind, where="", seed=0):
        """`where`: "all" or "table" on the servers; empty = one process, no servers."""
        self.network = Network(sparse=kind == "lazy", seed=seed)
        if where:
            set_param_ps(self.network if where == "all" else self.network.table)
        self.optimizer = OPTIMIZERS[kind](self.network.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.call: Callable[..., Tensor] = AutoParallel(self.network, "data_parallel") if where else self.network
        self._part = mine if where else lambda tensor: tensor

    def train(self, given):
        losses = []
        for rows, labels in given:
            loss = self.call(self._part(rows), self._part(labels))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(float(loss.detach()))
        return losses


def distance(one, other):
    """Return the largest difference of any parameter, relative to the largest element of that."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def trained(kind, where):
    expected, found = Run(kind), Run(kind, where)
    losses = zip(found.train(batches()), expected.train(batches()), strict=True)
    return {"losses": max(abs(a - b) / abs(b) for a, b in losses), "weights": distance(found.network, expected.network)}


def step_function():
    expected = Run("adam")
    expected.schedule.step = lambda: None
    expected.train(batches())
    network = Network()
    set_param_ps(network.table)
    optimizer = optim.Adam(network.parameters(), lr=0.02)
    differentiate = value_and_grad(lambda rows, labels: network(rows, labels), None, list(network.parameters()))

    def step(rows, labels):
        loss, gradients = differentiate(rows, labels)
        optimizer(gradients)
        return loss

    parallel = AutoParallel(step, "data_parallel")
    for rows, labels in batches():
        parallel(mine(rows), mine(labels))
    return {"weights": distance(network, expected.network)}


def accumulated():
    """Two backward passes for one step, without AutoParallel: what is not on servers stays the rank's own."""
    network, expected = Network(), Network()
    set_param_ps(network)
    optimizers = [optim.Adam(one.parameters(), lr=0.02) for one in (network, expected)]
    given = list(batches())
    for pair in zip(given[::2], given[1::2], strict=True):
        for rows, labels in pair:
            network(mine(rows), mine(labels)).backward()
            expected(rows, labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": distance(network, expected)}


def resumed(kind, how):
    """Save in the middle and go on in another network, or in the same one after more steps; equal bit for bit."""
    whole = Run(kind, "all")
    whole.train(batches(3))
    path = Path(f"checkpoint-{kind}-{how}").absolute()
    saved = copy.deepcopy({"network": whole.network.state_dict(), "optimizer": whole.optimizer.state_dict()})
    save_checkpoint(whole.network, path, whole.optimizer, integrated_save=how != "parts", async_save=how == "beside")
    rate = whole.schedule.state_dict()
    whole.train(batches(3, 3))
    expected = copy.deepcopy(whole.network.state_dict())
    other = whole if how == "again" else Run(kind, "" if how == "taken home" else "all", seed=1)
    other.schedule.load_state_dict(rate)
    if how == "torch":
        other.network.load_state_dict(saved["network"])
        other.optimizer.load_state_dict(saved["optimizer"])
    else:
        load_checkpoint(path, other.network, other.optimizer)
    other.train(batches(3, 3))
    if how == "taken home":  # one process goes on without servers
        return {"different": [] if distance(other.network, whole.network) < 1e-12 else ["weights"]}
    found = other.network.state_dict()
    return {"different": [name for name in expected if not torch.equal(expected[name], found[name])]}


class Tables(nn.Module):
    """Tables with first values of several kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        dtype = torch.float64
        self.first = nn.Linear(3, 3, dtype=dtype)
        self.plain = nn.Embedding(ROWS, 6, padding_idx=3, dtype=dtype)
        self.ranged = nn.Embedding(ROWS, 5, dtype=dtype)
        nn.init.uniform_(self.ranged.weight, -0.2, 0.3)
        self.words = EmbeddingLookup(ROWS, 4, "xavier_uniform", max_norm=0.3, vocab_cache_size=6, dtype=dtype)
        self.last = nn.Linear(15, 2, dtype=dtype)

    def forward(self, rows):
        found = torch.cat([self.plain(rows), self.ranged(rows), self.words(rows + 2)], -1)  # beyond the last: zeros
        return self.last(found).square().mean()


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and not t.is_meta]
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in made]
        self.elements = max(
            [self.elements, *(size for t, size in zip(made, sizes, strict=True) if t.dtype.is_floating_point)]
        )
        return result


def made():
    """The servers make tables in small blocks; no worker ever has one."""
    expected = Tables()
    with no_init_parameters():
        network = Tables()
    remote.BLOCK = 100  # more than one, fewer elements than a table has
    with Largest() as largest:
        set_param_ps(network, init_in_server=True)
    states = network.state_dict().values(), expected.state_dict().values()
    equal = [torch.equal(a, b) for a, b in zip(*states, strict=True)]
    optimizers = [optim.LazyAdam(one.parameters(), lr=0.02) for one in (network, expected)]
    call = AutoParallel(network, "data_parallel")
    with torch.inference_mode():  # memory for what it pulls serves training, too
        network(next(batches())[0])
    for rows, _ in batches(3):
        call(mine(rows)).backward()
        expected(rows).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"equal": equal, "largest": largest.elements, "weights": distance(network, expected)}


def stale():
    """Rank 0 waits until the others have gone as far ahead as they may."""
    set_ps_context(staleness=STALENESS)
    layer = nn.Linear(4, 4).double()
    set_param_ps(layer)
    set_ps_context(staleness=0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    store = dist.distributed_c10d._get_default_store()
    rank, others = get_rank(), [other for other in range(get_group_size()) if other]
    furthest = 0

    def train():
        layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()  # rank 0 gives the servers their values in its first step
    for step in range(STALE_STEPS):
        if rank == 0:
            store.set("begun 0", str(step + 1))
            if step + STALENESS < STALE_STEPS:
                store.wait([f"done {other} {step + STALENESS}" for other in others])
        train()
        if rank:
            furthest = max(furthest, step + 1 - int(store.get("begun 0")))
        store.set(f"done {rank} {step + 1}", "")
    dist.barrier()
    return {"furthest": furthest}


def shared():
    """Bodies of messages that are large enough to lie in memory that workers and servers share."""

    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(5000, 8, sparse=True), nn.Flatten(), nn.Linear(16, 1)).double()

    network, expected = build(), build()
    set_param_ps(network)
    optimizers = [OPTIMIZERS["lazy"](one.parameters()) for one in (network, expected)]
    call = AutoParallel(network, "data_parallel")
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 5000, (2000, 2), generator=generator)
        if step == 2:  # every row once, on every rank
            rows = torch.randperm(5000, generator=generator)[:4000].view(2000, 2)
        call(mine(rows)).square().mean().backward()
        expected(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    places = [connection._shared is not None for connection in _open_all()]
    return {"weights": distance(network, expected), "places": places}


def cached(staleness):
    """All ranks look one row up in every step; its value says how many steps it has."""
    set_ps_context(staleness=staleness, vocab_cache_size=2)
    table = nn.Embedding(5, 1).double()
    set_param_ps(table)
    set_ps_context(staleness=0, vocab_cache_size=0)
    nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    lacking = []
    for step in range(STALE_STEPS):
        dist.barrier()  # the gradients of all steps before have come
        for _ in range(2):
            values = table(torch.tensor([3, 4, 3]))
        lacking.append(step + int(values[0]))
        values[:1].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    cache = table.cache
    return {"lacking": lacking, "counts": [cache.hits, cache.misses, cache.copied_bytes]}


def refused():
    """Return what each wrong use is answered with."""
    network = Network()
    set_param_ps(network.table)
    rows, labels = next(batches())
    one = (mine(rows), mine(labels))
    parameters = list(network.parameters())

    def with_gradient(use):
        def run():
            network(*one).backward()
            use()

        return run

    tied = Network()
    tied.narrow.weight = nn.Parameter(torch.zeros(3, 1500, dtype=torch.float64))
    tied.head = nn.Linear(6, ROWS).double()
    tied.head.weight = tied.table.weight
    set_param_ps(tied.table)
    shared = Network()
    set_param_ps(shared.wide)
    with no_init_parameters():
        orthogonal = nn.Embedding(4, 2)
        nn.init.orthogonal_(orthogonal.weight)
    wrong = {
        "semi_auto": lambda: AutoParallel(network)(*one),
        "hsdp": lambda: AutoParallel(network, "data_parallel").hsdp(threshold=1)(*one),
        "tied": lambda: AutoParallel(tied, "data_parallel")(*one),
        "verify": lambda: AutoParallel(network, "data_parallel").verify(*one),
        "clip": with_gradient(lambda: clip_grad_norm_(parameters, 1.0)),
        "Lamb": with_gradient(lambda: optim.Lamb(parameters).step()),
        "LARS": with_gradient(lambda: optim.LARS(optim.SGD(parameters)).step()),
        "DDP": lambda: nn.parallel.DistributedDataParallel(shared)(*one),
        "closure": with_gradient(lambda: optim.SGD(parameters).step(lambda: network(*one))),
        "max_norm": lambda: set_param_ps(nn.Embedding(4, 2, max_norm=1.0)),
        "integers": lambda: set_param_ps(nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)),
        "in server": lambda: set_param_ps(nn.Embedding(4, 2), init_in_server=True),
        "orthogonal": lambda: set_param_ps(orthogonal, init_in_server=True),
        "slices": lambda: set_param_ps(EmbeddingLookup(8, 2, slice_mode="table_row_slice")),
        "row": lambda: network.table(torch.tensor([ROWS])),
        "load late": lambda: network.load_state_dict(Network().state_dict()),
        "word": lambda: set_ps_context(enable_pss=True),
        "ssl": lambda: set_ps_context(enable_ssl=True),
    }
    answers = {}
    for name, use in wrong.items():
        try:
            use()
            answers[name] = "accepted"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
        network.zero_grad()
    return {"answers": answers}


def with_servers(case):
    def run():
        set_ps_context(enable_ps=True)
        return case()

    return run


def cases(_ranks):
    found = {
        f"{kind}/{where}": lambda kind=kind, where=where: trained(kind, where)
        for kind in OPTIMIZERS
        for where in ("all", "table")
        if where == "all" or kind in ("sgd", "adam", "lazy")
    }
    found |= {
        f"resumed/{kind}/{how}": lambda kind=kind, how=how: resumed(kind, how)
        for kind in ("adam", "lazy")
        for how in ("file", "parts", "again", "beside", "torch")
        if kind == "lazy" or how in ("file", "torch")
    }
    found |= {
        "resumed/adam/taken home": lambda: resumed("adam", "taken home"),
        "step function": step_function,
        "accumulated": accumulated,
        "made in servers": made,
        "stale": stale,
        "shared": shared,
        "cached/0": lambda: cached(0),
        "cached/3": lambda: cached(STALENESS),
        "refused": refused,
    }
    return {name: with_servers(case) for name, case in found.items()}
