"""Trains one model in one mode on all ranks, and the same in one process; what comes of it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from msrun.runtime import AutoParallel, GradAccumulation, Pipeline, get_group_size, get_rank
from zoo.entry import Entry

STEPS = 5
MICRO_BATCHES = 4
STAGES = 2

Forward = Callable[..., Tensor]


def _semi_auto(entry, network):
    return AutoParallel(network)


def _level1(entry, network):
    return AutoParallel(network).hsdp(threshold=0, optimizer_level="level1")


def _level3(entry, network):
    return AutoParallel(network).hsdp(threshold=0, optimizer_level="level3")


def _data_parallel(entry, network):
    return AutoParallel(network, "data_parallel")


def _tensor_parallel(entry, network):
    assert entry.cut is not None
    entry.cut(network, get_group_size() // 2)
    return AutoParallel(network).dataset_strategy("full_batch")


def _pipeline(entry, network):
    return AutoParallel(Pipeline(network, MICRO_BATCHES)).dataset_strategy("full_batch").pipeline(STAGES)


MODES = {
    "semi_auto": _semi_auto,
    "hsdp level1": _level1,
    "hsdp level3": _level3,
    "data_parallel": _data_parallel,
    "tensor parallel": _tensor_parallel,
    "pipeline": _pipeline,
}
_WHOLE_BATCH = ("tensor parallel", "pipeline")


def tolerance(entry):
    """Return the relative difference of a loss that is allowed."""
    return 1e-10 if entry.is_float64 else 1e-5


@dataclass
class References:
    """Losses of one process, each found once."""

    entry: Entry

    def __post_init__(self):
        self._found: dict[str, list[float]] = {}

    def of(self, mode):
        """Return the losses that a mode must have."""
        kind = "plain"
        if self.entry.normalises_batch and mode in ("pipeline", "data_parallel"):
            kind = mode
        if kind not in self._found:
            self._found[kind] = self._train(kind)
        return self._found[kind]

    def _train(self, kind):
        network = self.entry.network()
        form = network
        if kind == "pipeline":
            form = Pipeline(network, MICRO_BATCHES)
        elif kind == "data_parallel":  # every rank's part has statistics of its own, as in torch's DDP
            form = GradAccumulation(network, get_group_size())
        forward = AutoParallel(form, "stand_alone") if self.entry.draws else form
        return train(self.entry, network, forward, whole_batch=True)


def train(entry, network, forward, *, whole_batch):
    """Return the losses of `STEPS` steps on one batch."""
    update = entry.optimizer(network)
    batch = entry.data() if whole_batch else mine(entry.data())
    losses = []
    for _ in range(STEPS):
        loss = forward(*batch)
        loss.backward()
        update()
        network.zero_grad()
        losses.append(loss.item())
    return losses


def mine(batch):
    """Return this rank's part of a batch."""
    return tuple(tensor.chunk(get_group_size())[get_rank()] for tensor in batch)


def difference(entry, mode, references):
    """Train a model in a mode; return the largest relative difference of a loss from one process.

    Raises:
        AssertionError: training changes nothing, so that equal losses would prove nothing.
    """
    right = references.of(mode)
    assert max(right) - min(right) > 1e-3 * abs(right[0]), f"losses do not move: {right}"
    network = entry.network()
    losses = train(entry, network, MODES[mode](entry, network), whole_batch=mode in _WHOLE_BATCH)
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, right, strict=True))


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    difference: float | None = None
    """The largest relative difference of a loss, on any rank."""
    refusal: str = ""
    """The error of msrun that every rank raised."""
    failure: str = ""
    """Anything else: another error, ranks that disagree."""


def outcome_of(reports):
    """Return what came of a case by what its ranks tell."""
    if all(report.kind == "done" for report in reports):
        return Outcome(max((report.found for report in reports), key=lambda value: (value != value, value)))
    if all(report.kind == "refused" for report in reports):
        return Outcome(refusal=reports[0].message)
    return Outcome(failure="\n".join(f"rank {n}: {r.trace or 'no error'}" for n, r in enumerate(reports)))
