"""Calibration: the device profile of this machine, measured."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import WorldError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.cost.devices import PROFILES, DeviceProfile, Link, Point
from msrun.runtime.cost.operators import measured_collective_seconds
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.given_strategies import shard
from msrun.runtime.parallel.modes.fsdp import LEAVES_WHOLE, ShardedNetwork
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.pipeline.compilation import compile_call
from msrun.runtime.parallel.plan import with_traffic
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.simulate.recording import operator_name, work_of
from ranktable.files import write_whole

WARM_STEPS, TIMED_STEPS = 1, 5
_TINY_LAYERS, _TINY_STEPS = 20, 50
_OF_COLLECTIVES = ("c10d", "_c10d_functional")
Step = Callable[[], object]
Key = tuple[str, float, float]
"""Name in the profile, operations, bytes."""


@dataclass
class _Total:
    count: int = 0
    seconds: float = 0.0


class OperatorTimes(TorchDispatchMode):
    """Times every operator that runs under it, collectives left out; of DTensors the operators on their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Key, _Total] = defaultdict(_Total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - begin
        if func.namespace not in _OF_COLLECTIVES:
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            work = work_of(func, args, kwargs, result, made)
            if work.launches:
                key = operator_name(func, work), work.operations, work.read_bytes + work.written_bytes
                self.found[key].count += 1
                self.found[key].seconds += seconds
        return result


def measure_operators(steps: Sequence[Step]) -> dict[str, list[Point]]:
    """Return what the operators of these training steps take: name -> (operations, bytes, seconds) of each size.

    Seconds are the mean over ranks and calls, times how much longer the slowest rank of a step takes than the mean:
    the others wait for it.
    """
    own = [_timed(step) for step in steps for _ in range(_warm(step))]
    ranks: list[list[dict[Key, _Total]]] = [own]
    if dist.is_initialized():
        ranks = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    totals: dict[Key, _Total] = defaultdict(_Total)
    for found in (found for each in ranks for found in each):
        for key, total in found.items():
            totals[key].count += total.count
            totals[key].seconds += total.seconds
    mean_s = {key: total.seconds / total.count for key, total in totals.items()}
    slowest = [max(_slowness(found, mean_s) for found in of_ranks) for of_ranks in zip(*ranks, strict=True)]
    spread = sum(slowest) / len(slowest)
    points: dict[str, list[Point]] = defaultdict(list)
    for (name, operations, nbytes), seconds in sorted(mean_s.items()):
        points[name].append((operations, nbytes, spread * seconds))
    return dict(points)


def _warm(step: Step) -> int:
    """Run a step without looking; returns how often it is timed afterwards."""
    for _ in range(WARM_STEPS):
        step()
    return TIMED_STEPS


def _timed(step: Step) -> dict[Key, _Total]:
    if dist.is_initialized():
        dist.barrier()
    times = OperatorTimes()
    with times:
        step()
    return dict(times.found)


def _slowness(found: Mapping[Key, _Total], mean_s: Mapping[Key, float]) -> float:
    """Return the seconds of one rank's step as a multiple of what its operators take in the mean."""
    expected_s = sum(total.count * mean_s[key] for key, total in found.items())
    return sum(total.seconds for total in found.values()) / expected_s


def measure_overhead_s() -> float:
    """Return what Python and autograd take for each operator, beside the operator: of a network of tiny layers."""
    net = nn.Sequential(*(layer for _ in range(_TINY_LAYERS) for layer in (nn.Linear(4, 4), nn.Tanh())))
    batch = torch.ones(4, 4)

    def step() -> None:
        net(batch).sum().backward()
        net.zero_grad()

    _warm(step)
    found = list(_timed(step).values())
    operators = sum(total.count for total in found)
    begin = time.perf_counter()
    for _ in range(_TINY_STEPS):
        step()
    return max(0.0, ((time.perf_counter() - begin) / _TINY_STEPS - sum(total.seconds for total in found)) / operators)


class _Sample(nn.Module):
    """A network with all usual kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.AvgPool2d(2)
        )
        self.words = nn.Embedding(1000, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(128 + 32, 1000)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """(8, 3, 32, 32) images and (8, 64) words -> (8, 1000) scores."""
        features = self.convolutions(images).mean((2, 3))
        scores: Tensor = self.head(torch.cat([self.layer(self.words(words)).mean(1), features], 1))
        return scores


def sample_step() -> Step:
    """Return a training step of a small network with all usual kinds of layers, and of torch's AdamW."""
    with torch.random.fork_rng(devices=()):
        net = _Sample()
        images, words, labels = torch.randn(8, 3, 32, 32), torch.randint(1000, (8, 64)), torch.randint(1000, (8,))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.random.fork_rng(devices=()):
            cross_entropy(net(images, words), labels).backward()
        optimizer.step()

    return step


WIDTH, ROWS, PAIRS = 256, 64, 6
FSDP_WIDTH, FSDP_THRESHOLD_KB = 512, 16
FSDP_COPIES = ("fsdp.", "aten._foreach_copy_")
ROUNDS = 24
StepTime = tuple[float, float]
"""Seconds of a step, and seconds of this rank's processor time in it."""
MessageSeconds = Callable[[str, int], float]
"""A collective's name and its bytes on a rank -> its seconds over all ranks."""


class _Pairs(nn.Module):
    """Pairs of linear layers beside a value that lives across their messages, as in most networks; by columns and rows
    over `parts` ranks, each computes as much as one rank alone of layers that are whole."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(PAIRS):
            up, down = nn.Linear(WIDTH, WIDTH * parts, bias=False), nn.Linear(WIDTH * parts, WIDTH, bias=False)
            self.layers += [shard(up, ((1, 1), (parts, 1))), shard(down, ((1, parts), (1, parts)))]
        self.relu, self.add = shard(torch.relu, ((1, parts),)), shard(torch.add, ((1, 1), (1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """(ROWS, WIDTH) -> a loss."""
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = self.add(x, down(self.relu(up(x))))
        return x.mean()


def measure_wait_s(message_s: MessageSeconds) -> float:
    """Return what one message adds to a step beside its own seconds, from steps with and without messages by turns.

    All ranks call it together. Lower quartiles count: a step that another program has held up says nothing of messages.
    It is at the least the processor time that a message takes of all ranks, on the cores that they share: that is the
    same whatever else the machine does.

    Args:
        message_s: of messages that come back to back with others of their kind.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        (cut, calls), (whole, own_calls) = _compiled(_Pairs(world.get_group_size())), _compiled(_Pairs(1))
        batch = torch.randn(ROWS, WIDTH)
    steps = [(_step_s(cut, batch), _step_s(whole, batch)) for _ in range(ROUNDS)]
    with_messages, without = zip(*steps, strict=True)
    added = added_s(with_messages, without, _ranks_per_core())
    return max(0.0, added / (calls - own_calls) - message_s("all_reduce", batch.nbytes))


def measure_fsdp_s(message_s: MessageSeconds) -> float:
    """Return what a collective of torch's FSDP2 adds to a step beside its own seconds and the copies around it.

    All ranks call it together. It is measured as `measure_wait_s` does it, with layers whose weights are cut and whose
    biases are whole.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        whole, cut = _layers(), _layers()
        batch = torch.randn(ROWS, _fsdp_width())
    messages = _messages_of(cut)
    ShardedNetwork(Target(cut, cut), HsdpSpec(threshold=FSDP_THRESHOLD_KB, optimizer_level="level3"), sums_wide=False)

    def run(x: Tensor) -> Tensor:
        return cut(x).mean()

    def run_whole(x: Tensor) -> Tensor:
        return whole(x).mean()

    for _ in range(2):  # FSDP2 makes its plan in the first step
        _step_s(run, batch), _step_s(run_whole, batch)
    with OperatorTimes() as times:
        run(batch).backward()
    copies_s = sum(total.seconds for (name, _, _), total in times.found.items() if name.startswith(FSDP_COPIES))
    of_cut, of_whole = zip(*((_step_s(run, batch), _step_s(run_whole, batch)) for _ in range(ROUNDS)), strict=True)
    sent_s = sum(message_s(operation, nbytes) for operation, nbytes in messages)
    around_s = (added_s(of_cut, of_whole, _ranks_per_core()) - copies_s - sent_s) / len(messages)
    return max(0.0, around_s)


def _ranks_per_core() -> float:
    return world.get_group_size() / len(set[int]().union(*gather(os.sched_getaffinity(0))))


def _fsdp_width() -> int:
    """Return a width of layers that all ranks can cut into equal parts: others would stay whole."""
    ranks = world.get_group_size()
    return -(-FSDP_WIDTH // ranks) * ranks


def _layers() -> nn.Sequential:
    layers = (nn.Linear(_fsdp_width(), _fsdp_width(), bias=LEAVES_WHOLE) for _ in range(PAIRS))
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))


def _messages_of(network: nn.Module) -> list[tuple[str, int]]:
    """Return the collectives of a step of a network under FSDP2, and their bytes on a rank."""
    found: list[tuple[str, int]] = []
    for value in network.parameters():
        if value.nbytes < FSDP_THRESHOLD_KB << 10:
            found.append(("all_reduce", value.nbytes))
        else:
            found += [("all_gather", value.nbytes // world.get_group_size())] * 2 + [("reduce_scatter", value.nbytes)]
    return found


def added_s(more: Sequence[StepTime], fewer: Sequence[StepTime], ranks_per_core: float) -> float:
    """Return how much longer one kind of steps takes than another one."""
    elapsed_s, processor_s = (
        statistics.quantiles(longer, n=4)[0] - statistics.quantiles(shorter, n=4)[0]
        for longer, shorter in zip(zip(*more, strict=True), zip(*fewer, strict=True), strict=True)
    )
    return max(elapsed_s, processor_s * max(1.0, ranks_per_core))


Run = Callable[[Tensor], Tensor]


def _compiled(network: nn.Module) -> tuple[Run, int]:
    """Return what runs a network, and how many messages its step has."""
    rank, mesh = world.get_rank(), build_mesh(world.get_group_size())
    settings = ParallelSettings(dataset_strategy="full_batch")
    compilation = Compilation(
        Target(network, network), settings, mesh, rank, ParameterStorage(network, mesh, rank, settings.hsdp)
    )
    _, call, plan = compile_call(compilation, [torch.empty(ROWS, WIDTH)], {})
    traffic = with_traffic(plan, call, rank).traffic
    assert traffic is not None
    return lambda batch: call.run([batch])[0], sum(traffic.calls.values())


def _step_s(run: Run, batch: Tensor) -> StepTime:
    dist.barrier()
    begin_s, processor_begin_s = time.perf_counter(), time.process_time()
    run(batch).backward()
    processor_s = time.process_time() - processor_begin_s
    dist.barrier()
    return time.perf_counter() - begin_s, processor_s


MATRIX, COPIED_BYTES, TINY = 768, 64 * 2**20, 4
SIZES = (2**10, 2**16, 2**20, 2**23)
"""Bytes of the messages that are measured."""
MESSAGES = 20
"""Of each size between two ranks."""
_TYPES = (torch.float32, torch.float64, torch.bfloat16)


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    name: str = "measured",
    step: Callable[[], object] | None = None,
) -> DeviceProfile:
    """Measure what this rank's processor and the links between the ranks of this host do, all ranks at once.

    All ranks call it together, after `init()`: they share cores and memory as they do in training. Alone it measures
    one process, and takes the links of the profile `cpu`. It measures

    - matrix products of 768 x 768, a copy of 64 MB and an addition of 4 numbers, for the roofline: medians;
    - the operators of a training step of a small network with all usual kinds of layers, and those of `step`: each
      with its operations, bytes and mean seconds, while the step runs. Times are those of the slowest rank of a step,
      for whom the others wait;
    - what Python and autograd take for each operator;
    - collectives over all ranks of 1 KB to 8 MB: medians;
    - what a step waits for a message beside its own seconds: small programs with messages, and without, by turns;
      of torch's FSDP2 with what its Python takes.

    It takes a few seconds, and six times `step`.

    Args:
        path: rank 0 writes the profile there as JSON, for `msrun --sim_device PATH`.
        name: of the profile.
        step: your training step, without arguments. Give it for a time that is right for your own network: a dry run
            with other settings then scales what its operators have taken here. It is called six times, and trains.

    Returns:
        The profile; the mean over the ranks. Links between hosts are those of the profile `cpu`.

    Raises:
        WorldError: ranks on several hosts, on a device other than the CPU, or the file cannot be written.
    """
    place = world.world()
    if place.local_world_size != place.world_size or world.device().type != "cpu":
        raise WorldError(
            f"calibrate() with {place.world_size} ranks on {world.device().type}: it measures the ranks of one host on "
            "the CPU; start it with msrun on one host"
        )
    flops = {str(dtype).removeprefix("torch."): _mean(2.0 * MATRIX**3 / _product_s(dtype)) for dtype in _TYPES}
    source, target = (torch.zeros(COPIED_BYTES // 4) for _ in range(2))
    bandwidth = _mean(2.0 * COPIED_BYTES / _median_s(lambda: target.copy_(source), 10))
    tiny = torch.zeros(TINY)
    launch_s = _mean(_median_s(lambda: tiny + tiny, 2000))
    given = PROFILES["cpu"]
    profile = DeviceProfile(
        name,
        flops,
        bandwidth,
        _memory_bytes() // place.local_world_size,
        launch_s,
        in_host=given.in_host,
        between_hosts=given.between_hosts,
        to_host=Link(launch_s, bandwidth / 2),
        devices_per_host=place.local_world_size,
        has_streams=False,
        overhead_s=_mean(measure_overhead_s()),
        operators=measure_operators([sample_step(), *([] if step is None else [step])]),
    )
    if place.world_size > 1:
        profile = _with_messages(profile, place.global_rank, place.world_size)
    if path is not None and place.global_rank == 0:
        try:
            write_whole(path, (json.dumps(profile.to_json(), indent=1) + "\n").encode())
        except OSError as error:
            raise WorldError(f"calibrate({os.fspath(path)!r}): cannot be written ({error.strerror})") from None
    return profile


def _with_messages(profile: DeviceProfile, rank: int, ranks: int) -> DeviceProfile:
    """Return a profile that knows what messages between the ranks of this host take, and what steps wait for them."""
    collectives = {operation: _collective_points(operation, ranks) for operation in _COLLECTIVES}
    collectives["send"] = _message_points(rank, ranks)
    profile = replace(profile, collectives=collectives, in_host=_link(collectives["all_reduce"]))

    def message_s(operation: str, nbytes: int) -> float:
        """Back to back with others of its kind."""
        return measured_collective_seconds(operation, nbytes, ranks, profile.in_host, profile)

    return replace(profile, fsdp_s=_mean(measure_fsdp_s(message_s)), wait_s=_mean(measure_wait_s(message_s)))


def _product_s(dtype: torch.dtype) -> float:
    left, right = (torch.rand(MATRIX, MATRIX).to(dtype) for _ in range(2))
    return _median_s(lambda: left @ right, 9)


def _link(points: Sequence[Point]) -> Link:
    """Return the link for which the model of an all-reduce gives the times that the smallest and the largest took."""
    (ranks, small, small_s), *_, (_, large, large_s) = points
    alpha_s = small_s / math.ceil(math.log2(ranks))
    passed = 2 * (ranks - 1) / ranks * (large - small) if ranks > 2 else large - small
    return Link(alpha_s, passed / max(large_s - small_s, 1e-9))


def _collective_points(operation: str, ranks: int) -> list[Point]:
    """Return (ranks, bytes of the input of one rank, seconds) of collectives over all ranks."""
    found: list[Point] = []
    for size in SIZES:
        part = torch.zeros(size // 4 // ranks)
        whole = torch.zeros(part.numel() * ranks)
        send, call = _COLLECTIVES[operation](part, whole)
        dist.barrier()
        found.append((ranks, send.nbytes, _mean(_median_s(call, 20))))
    return found


def _message_points(rank: int, ranks: int) -> list[Point]:
    """Return (2, bytes, seconds) of messages to the rank half the world away, from the send to the receiver's return.

    Both ranks compute before and after they send. So where ranks share cores a message waits for its receiver to get
    one, which takes far longer than the way itself. All clocks are the host's one.
    """
    half = ranks // 2
    found: list[Point] = []
    for size in SIZES:
        took: list[float] = []
        value = torch.zeros(size // 8, dtype=torch.float64)
        dist.barrier()
        for number in range(MESSAGES if rank < 2 * half else 0):
            _compute()
            if (rank < half) == (number % 2 == 0):
                value[0] = time.perf_counter()
                sent = dist.isend(value, (rank + half) % (2 * half))
                _compute()
                sent.wait()  # type: ignore[union-attr]  # this rank is a member of the group
            else:
                dist.recv(value, (rank + half) % (2 * half))
                took.append(time.perf_counter() - float(value[0]))
        total = torch.tensor([sum(took), float(len(took))], dtype=torch.float64)
        dist.all_reduce(total)
        found.append((2, size, float(total[0] / total[1])))
    return found


def _compute() -> None:
    """Take a millisecond of this rank's processor."""
    matrix, begin = torch.ones(64, 64), time.thread_time()
    while time.thread_time() - begin < 1e-3:
        matrix @ matrix


_COLLECTIVES: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Callable[[], object]]]] = {
    "all_reduce": lambda _, whole: (whole, lambda: dist.all_reduce(whole)),
    "all_gather": lambda part, whole: (part, lambda: dist.all_gather_into_tensor(whole, part)),
    "reduce_scatter": lambda part, whole: (whole, lambda: dist.reduce_scatter_tensor(part, whole)),
    "all_to_all": lambda _, whole: (whole, lambda: dist.all_to_all_single(torch.empty_like(whole), whole)),
    "broadcast": lambda _, whole: (whole, lambda: dist.broadcast(whole, 0)),
}
"""operation -> from a part of one rank and a whole: its input, and how it is called"""


def _median_s(call: Callable[[], object], times: int) -> float:
    """Return how long a call takes, after two that do not count."""
    found = []
    for number in range(times + 2):
        begin = time.perf_counter()
        call()
        if number > 1:
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _mean(value: float) -> float:
    """Return the mean of a figure over the ranks."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
