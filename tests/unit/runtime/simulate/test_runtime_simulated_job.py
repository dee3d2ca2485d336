"""A job on ranks that do not exist: its classes of ranks, its memory, its time, and what hosts send each other."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun import contract
from msrun.errors import StrategyError, WorldError
from msrun.runtime import AutoParallel, GradAccumulation, Pipeline, WithLoss, init, release, set_target
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.cost.devices import PROFILES
from msrun.runtime.cost.operators import NOTHING, Work, collective_seconds
from msrun.runtime.joining.launchers import find_simulated
from msrun.runtime.optim import offload
from msrun.runtime.simulate.job import Asked, count_host_traffic, simulate_job
from msrun.runtime.simulate.recording import format_bytes, work_of
from msrun.runtime.simulate.report import Report, build_trace, render_page, render_table

DEVICE = PROFILES["a100"]
WIDTH = 64
ELEMENTS = 2 * (WIDTH * WIDTH + WIDTH) + 4 * WIDTH + 4
"""Of the network's parameters."""


@pytest.fixture
def join(monkeypatch):
    """Join a world of ranks that do not exist."""

    def run(ranks=16, rank=0):
        release()
        place = {"MSRUN_SIM_LEVEL": "3", "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "8"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        init()

    yield run
    release()


@pytest.fixture
def simulate(join):
    """Look at a step of a small network on 16 ranks, or on others."""

    def run(
        ranks=16,
        *,
        stages=1,
        level=2,
        rank=0,
        hsdp="",
        mode="semi_auto",
        device=DEVICE,
        prepare=lambda _net, _optimizer: None,
    ):
        join(ranks, rank)
        layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        net = WithLoss(nn.Sequential(*layers, nn.Linear(WIDTH, 4)), nn.CrossEntropyLoss())
        run.optimizer = torch.optim.AdamW(net.parameters())  # alive until the end
        prepare(net, run.optimizer)
        net = Pipeline(net, 4) if stages > 1 else net
        parallel = AutoParallel(net, mode)
        if stages > 1:
            parallel.pipeline(stages=stages)
        if hsdp:
            parallel.hsdp(threshold=0, optimizer_level=hsdp)
        batch = torch.zeros(8, WIDTH), torch.zeros(8, dtype=torch.long)
        return simulate_job(Asked(Target(net, net), parallel.settings, batch, {}, device, level, rank))

    return run


def record_of(job):
    return job.classes[0].record


def report_of(job, level=2):
    return Report(job, level, 8, ("train.py",), ())


def test_world_of_any_size_is_joined_alone(simulate):
    job = simulate(65536, rank=40000)
    (alike,) = job.classes
    assert (job.world_size, alike.ranks, alike.rank) == (65536, range(65536), 40000)


def test_level_0_decides_and_looks_at_nothing(simulate):
    job = simulate(level=0)
    assert (record_of(job), job.step) == (None, None)
    assert render_table(report_of(job, 0)).endswith(job.plan.explain())


def test_memory_traffic_and_time_are_those_of_the_formulas(simulate):
    job = simulate()
    step, record = job.step, record_of(job)
    assert record.parameter_bytes == record.gradient_bytes == 4 * ELEMENTS
    assert record.optimizer_bytes == 8 * ELEMENTS + 4 * 6  # two moments, and a number of steps for each of six
    assert record.optimizer == "AdamW"
    assert record.traffic == job.plan.traffic
    assert record.traffic.bytes["all_reduce"] == 4 * ELEMENTS + 2 * 4  # and the count and the sum of the loss
    crossing = 2 * 15 / 16 * record.traffic.bytes["all_reduce"]
    found = count_host_traffic(job, 8).nbytes
    assert found[0, 1] == found[1, 0] == pytest.approx(crossing), "hosts hand on what a ring does"
    assert found[0, 0] == pytest.approx(7 * crossing)
    spans = [span for span in record.recording.spans if span.is_message]
    for span in spans:
        right = collective_seconds(span.name, span.nbytes, 16, DEVICE.between_hosts)
        assert span.end_s - span.begin_s == pytest.approx(right)
    later = [span.begin_s for span in spans]
    assert later == sorted(later), "messages go one after the other"
    assert step is not None
    assert step.seconds == pytest.approx(step.compute_s + step.waits_s)
    assert step.waits_s <= step.messages_s
    table = render_table(report_of(job))
    assert "ranks 0-15" in table and "0 % of 80 GB" in table


@pytest.mark.slow
def test_layer_on_the_host_takes_nothing_of_the_device(simulate):
    before = record_of(simulate())
    moved = simulate(prepare=lambda net, _: set_target(net.network[0], "cpu"))
    record, layer = record_of(moved), 4 * (WIDTH * WIDTH + WIDTH)
    assert record.parameter_bytes == before.parameter_bytes
    assert (record.host_parameter_bytes, record.host_state_bytes) == (layer, 2 * layer + 2 * 4)
    assert record.peak_bytes <= before.peak_bytes - 3 * layer
    assert f"host memory of ranks 0-15: {format_bytes(record.host_bytes)}" in render_table(report_of(moved))


def test_optimizer_on_the_host_has_its_state_and_its_copies_there(simulate):
    record = record_of(simulate(prepare=lambda _, optimizer: offload(optimizer)))
    assert record.optimizer_bytes == record.host_state_bytes == 8 * ELEMENTS + 4 * 6
    assert record.host_copy_bytes == 4 * ELEMENTS
    assert record.peak_bytes == record.parameter_bytes + sum(record.at_peak.values())


def test_stages_are_looked_at_one_each_and_wait_for_each_other(simulate):
    measured = replace(DEVICE, collectives={"send": [(2, 512, 0.5)]})  # 8 rows in 4 micro batches, of 64 elements
    job = simulate(8, stages=2, rank=3, device=measured)
    classes = [(alike.ranks, alike.rank, alike.stages) for alike in job.classes]
    assert classes == [(range(4), 3, (0,)), (range(4, 8), 7, (1,))]
    records = [alike.record for alike in job.classes]
    assert job.step is not None and job.step.bubble is not None
    assert 0 < job.step.bubble < 1
    assert len(job.step.timeline) == 2
    assert job.step.seconds > max(record.compute_s for record in records)
    assert job.plan.pipeline is not None
    traffic = [record.traffic for record in records]
    assert [alike.plan.traffic for alike in job.classes] == list(job.plan.pipeline.traffic) == traffic
    assert count_host_traffic(job, 4).nbytes[0, 1] >= 4 * traffic[0].bytes["send"]
    page = render_page(report_of(job))
    assert page.count("ranks 0-3, stage 0") == page.count("ranks 4-7, stage 1") == 2
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page
    events = build_trace(job)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"ranks 0 to 3", "ranks 4 to 7"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    sender, reader = job.step.timeline
    assert reader[0].begin - sender[0].end == pytest.approx(0.5), "as long as was measured"


def test_replicas_hold_everything_and_send_their_gradients_in_buckets(simulate):
    job = simulate(mode="data_parallel")
    record = record_of(job)
    assert record.parameter_bytes == record.gradient_bytes == 4 * ELEMENTS
    assert record.optimizer_bytes == 8 * ELEMENTS + 4 * 6
    assert record.at_peak["messages"] == 4 * ELEMENTS, "DDP keeps its buckets"
    assert record.traffic == job.plan.traffic
    assert record.traffic.bytes == {"all_reduce": 4 * ELEMENTS + 4}  # and the mean of the loss
    assert job.step is not None
    assert job.step.seconds == pytest.approx(job.step.compute_s + job.step.waits_s)


def test_cut_parameters_take_their_part_with_and_without_fsdp2(simulate):
    whole, head = 4 * (2 * (WIDTH * WIDTH + WIDTH)), 4 * (4 * WIDTH + 4)  # 4 rows cannot be cut over 16 ranks
    for mode in ("data_parallel", "semi_auto"):
        record = record_of(simulate(mode=mode, hsdp="level3"))
        assert record.parameter_bytes == whole // 16 + head
        if mode == "data_parallel":
            assert record.gradient_bytes == record.parameter_bytes
            assert record.traffic.bytes["reduce_scatter"] == whole
            assert record.traffic.bytes["all_gather"] == 2 * whole // 16  # forward, and again for the backward pass


def test_processors_wait_for_every_message_of_fsdp2_and_devices_reduce_beside_operators(simulate):
    for device in (PROFILES["cpu"], DEVICE):
        job = simulate(mode="data_parallel", hsdp="level3", device=device)
        assert job.step is not None
        messages_s = record_of(job).recording.seconds(messages=True)
        if device is DEVICE:
            assert 0 < job.step.waits_s < 0.9 * messages_s
        else:
            assert job.step.waits_s == pytest.approx(messages_s)


@pytest.mark.slow
def test_what_python_takes_around_messages_counts_under_fsdp2_alone(simulate):
    def step_s(hsdp, **more_s):
        job = simulate(mode="data_parallel", hsdp=hsdp, device=replace(PROFILES["cpu"], **more_s))
        assert job.step is not None
        return job.step.seconds, sum(record_of(job).traffic.calls.values())

    plain_s, messages = step_s("level3")
    assert step_s("level3", fsdp_s=1.0)[0] - plain_s == pytest.approx(messages)
    assert step_s("", fsdp_s=1.0)[0] < 1.0


def test_ranks_that_stand_alone_send_nothing(simulate):
    job = simulate(mode="stand_alone")
    record = record_of(job)
    assert (job.classes[0].ranks, record.traffic.bytes) == (range(16), {})
    assert record.peak_bytes > 4 * 4 * ELEMENTS
    assert job.step is not None
    assert job.step.seconds == job.step.compute_s


class Reads(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("net", "shards", "level", "text"),
    [
        (
            nn.Sequential(nn.Linear(2, 2), Reads()),
            False,
            1,
            r"needs values, which a dry run does not.*use --sim_level 0",
        ),
        (
            GradAccumulation(nn.Sequential(nn.Linear(2, 2)), 2),
            True,
            0,
            r"no gradients; use parallel_mode=\"semi_auto\"",
        ),
    ],
)
def test_network_that_cannot_be_looked_at_is_refused_with_a_remedy(join, net, shards, level, text):
    join()
    parallel = AutoParallel(net, "data_parallel")
    settings = (parallel.hsdp(threshold=0) if shards else parallel).settings
    with pytest.raises(StrategyError, match=text):
        simulate_job(Asked(Target(net, net), settings, (torch.zeros(2, 2),), {}, DEVICE, level, 0))


def test_users_network_is_as_before_when_it_has_been_looked_at(join):
    join()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    values = dict(net.named_parameters())
    settings = AutoParallel(net, "data_parallel").hsdp(threshold=0).settings
    simulate_job(Asked(Target(net, net), settings, (torch.zeros(4, WIDTH),), {}, DEVICE, 2, 0))
    assert dict(net.named_parameters()) == values
    assert type(net[0]) is nn.Linear
    assert net[1].num_batches_tracked == 0


def test_launcher_knows_the_names_of_all_profiles_and_no_other_levels():
    assert set(contract.SIM_DEVICES) == set(PROFILES)
    with pytest.raises(WorldError, match="MSRUN_SIM_LEVEL=7: must be 0, 1, 2 or 3"):
        find_simulated({contract.MSRUN_SIM_LEVEL: "7", "RANK": "0", "WORLD_SIZE": "2"})


class Works(TorchDispatchMode):
    """Keeps what each operator does."""

    def __init__(self):
        super().__init__()
        self.found: list[Work] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.found.append(work_of(func, args, kwargs, result, made))
        return result


def test_operators_that_write_into_their_arguments_move_bytes_too_and_views_none():
    """FSDP2 copies whatever it gathers and reduces by operators that return nothing."""
    whole, parts = torch.ones(8, 4), [torch.ones(8, 1), torch.ones(8, 3)]
    with Works() as works:
        torch._foreach_copy_([whole], [torch.zeros_like(whole)])
        torch.ops.fsdp.split_with_sizes_copy(whole, [1, 3], 1, out=parts)
        torch.ops.fsdp.chunk_cat([whole], dim=0, num_chunks=2, out=torch.empty(2, 16))
    written = [work.written_bytes for work in works.found if work.read_bytes > whole.nbytes]
    assert written == [whole.nbytes] * 3
    with Works() as works:
        torch.empty(4).view(2, 2)
    assert works.found == [NOTHING, NOTHING]
