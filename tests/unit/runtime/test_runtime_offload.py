"""Parts of the work on the host: states of optimizers, its thread, and what a device never waits for."""

import copy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from host_operators import AdamWeightDecayOp
from job_runner import wait_until
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from msrun import contract
from msrun.agent.processes.progress_board import ProgressBoard
from msrun.errors import StrategyError
from msrun.mindspore import nn as ms_nn
from msrun.runtime import AutoParallel, clip_grad_norm_, optim, progress, world
from msrun.runtime.execute import transfers
from msrun.runtime.execute.segment_runner import HostThread
from msrun.runtime.optim import host_steps

STEPS = 5
MAKERS = {
    "SGD": lambda p: optim.SGD(p, 0.1, 0.9),
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW of torch": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW with foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "AdamWeightDecay": lambda p: optim.AdamWeightDecay(p, 0.01, decay_filter=lambda x: x.dim() > 1, weight_decay=0.1),
    "Lamb": lambda p: optim.Lamb(p, 0.01),
    "LazyAdam": lambda p: optim.LazyAdam(p, 0.01),
    "FTRL": lambda p: optim.FTRL(p, lr=0.1),
    "a user's own": lambda p: AdamWeightDecayOp(p, 0.01, weight_decay=0.1),
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def take_steps(net, optimizer, count=STEPS):
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(count):
        x = torch.randn(3, 6, generator=draw).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_steps_are_those_of_the_device(make, ratio):
    left, right = network(), network()
    on_device, on_host = make(left.parameters()), optim.offload(make(right.parameters()), ratio=ratio)
    assert take_steps(right, on_host) == pytest.approx(take_steps(left, on_device), rel=1e-12, abs=0)
    torch.testing.assert_close([*left.parameters()], [*right.parameters()], rtol=1e-12, atol=1e-15)


def test_small_chunks_step_as_one_does(monkeypatch):
    monkeypatch.setattr(host_steps, "CHUNK_BYTES", 100)
    left, right = network(), network()
    on_host = take_steps(right, optim.Lamb(right.parameters(), target="cpu"))
    assert on_host == pytest.approx(take_steps(left, optim.Lamb(left.parameters())), rel=1e-12, abs=0)


@pytest.mark.parametrize(("word", "target"), [("CPU", "cpu"), ("Cpu", "cpu"), ("DEVICE", "device")])
def test_target_is_mindspores_word_in_any_case_before_and_after(word, target):
    net = network()
    later = ms_nn.Lamb(net.parameters(), 0.1)
    assert later.target == "device"
    later.target = word
    assert later.target == optim.AdamW(net.parameters(), target=word).target == target


@pytest.mark.parametrize("make", [MAKERS["Adam"], MAKERS["AdamWeightDecay"], MAKERS["LazyAdam"]])
def test_target_may_change_between_steps_and_the_state_moves_along(make):
    left, right = network(), network()
    still, moving = make(left.parameters()), make(right.parameters())
    for word in ("CPU", "device", "cpu"):
        moving.target = word
        for net, optimizer in ((left, still), (right, moving)):
            take_steps(net, optimizer, 2)
    torch.testing.assert_close([*left.parameters()], [*right.parameters()], rtol=1e-12, atol=1e-15)


def test_wrong_words_are_refused_with_what_to_do():
    net = network()
    with pytest.raises(StrategyError, match=r"AdamW\(target='gpu'\): must be cpu or device"):
        optim.AdamW(net.parameters(), target="gpu")
    with pytest.raises(StrategyError, match=r"LBFGS.*use AdamW"):
        optim.offload(torch.optim.LBFGS(net.parameters()))
    for ratio in (0, 1.5, True, "half"):
        with pytest.raises(StrategyError, match="must be a number above 0, 1 at most"):
            optim.offload(optim.SGD(net.parameters()), ratio=ratio)
    with pytest.raises(StrategyError, match=r"give a torch\.optim\.Optimizer"):
        optim.offload(net)
    with pytest.raises(StrategyError, match=r"works on the device: call optim\.offload"):
        AutoParallel(net).offload_gradients(optim.SGD(net.parameters()))


def test_half_of_the_bytes_are_on_the_host_spread_over_the_network():
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(8)]
    optimizer = optim.offload(optim.Adam(parameters), ratio=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones(100)
    optimizer.step()
    memory = optim.memory_of(optimizer)
    assert memory.host.weights == 4 * 400
    assert memory.host.state == pytest.approx(memory.device.state, rel=0.01)
    assert memory.copied.to_device == 4 * 400


def descend(optimizer, weight, count=100):
    for _ in range(count):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return float(weight.detach()[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_documents_recipe_without_masters_stalls_and_says_so_once(dtype, logged):
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = optim.offload(AdamWeightDecayOp([weight], learning_rate=2e-5), master_weights=False)
    assert descend(optimizer, weight) == 1.0
    (record,) = logged
    assert record.getMessage().startswith("AdamWeightDecayOp: weights of 16 bits without master weights: updates sm")
    assert "master_weight" not in optimizer.state[weight]
    assert optimizer.state[weight]["adam_m"].dtype == torch.float32
    with_masters = optim.offload(AdamWeightDecayOp([weight], learning_rate=2e-5))
    assert descend(with_masters, weight, 200) < 0.99


def test_state_dict_brings_back_masters_and_moments_in_float32():
    left, right = network(torch.bfloat16), network(torch.bfloat16)
    first = optim.AdamW(left.parameters(), 0.01, target="cpu")
    take_steps(left, first, 3)
    second = optim.AdamW(right.parameters(), 0.01, target="cpu")
    right.load_state_dict(left.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert take_steps(left, first) == take_steps(right, second)
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        for key in ("master_weight", "exp_avg", "exp_avg_sq"):
            assert first.state[a][key].dtype == second.state[b][key].dtype == torch.float32
            assert torch.equal(first.state[a][key], second.state[b][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_changed_between_steps_count_as_they_are(dtype):
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    optimizer = optim.SGD([weight], 2.0**-12, target="cpu")
    descend(optimizer, weight, 3)
    with torch.no_grad():
        weight[1] = 10.0
    descend(optimizer, weight, 1)
    master = optimizer.state[weight]["master_weight"] if dtype == torch.bfloat16 else weight.detach()
    steps = torch.tensor([4.0, 1.0, 4.0]) * 2.0**-12
    assert torch.equal(master, torch.tensor([1.0, 10.0, 3.0]) - steps)


SPARSE = [lambda p: optim.LazyAdam(p, 0.1, target="cpu"), lambda p: optim.offload(torch.optim.SparseAdam(p, lr=0.1))]


@pytest.mark.parametrize("make", SPARSE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sparse_gradients_stay_sparse_and_untouched_rows_bit_for_bit(make, dtype):
    torch.manual_seed(0)
    table = nn.Embedding(1000, 8, sparse=True, dtype=dtype)
    before = table.weight.detach().clone()
    optimizer = make(table.parameters())
    for rows in ([3, 5, 3], [5, 7, 9]):
        optimizer.zero_grad()
        table(torch.tensor(rows)).float().square().sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        optimizer.step()
    touched = [3, 5, 7, 9]
    rest = [row for row in range(1000) if row not in touched]
    assert torch.equal(table.weight[rest], before[rest])
    assert not torch.equal(table.weight[touched], before[touched])
    memory = optim.memory_of(optimizer)
    row = 8 * dtype.itemsize
    assert memory.copied.to_host == 3 * (row + 8), "three rows of gradients and their numbers"
    assert memory.copied.to_device == 3 * row


def test_gradients_go_to_the_host_as_they_come_and_both_clips_find_them():
    losses = {}
    for clip in (None, clip_grad_norm_, nn.utils.clip_grad_norm_):
        net = network(torch.float32)
        optimizer = optim.AdamW(net.parameters(), 0.01, target="cpu")
        if clip is not None:
            AutoParallel(net).offload_gradients(optimizer)
        found = []
        for step in range(STEPS):
            for part in range(2):
                loss = net(torch.full((2, 6), 0.1 * step + part)).square().mean()
                loss.backward()
            norm = (clip or clip_grad_norm_)(net.parameters(), 0.05)
            memory = optim.memory_of(optimizer)
            held, away = memory.device.gradients, memory.host.gradients
            assert (held, away) == ((0, 4 * 92) if clip is not None else (4 * 92, 0))
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in net.parameters())
            found += [loss.item(), float(norm)]
        losses[clip] = found
    right = losses.pop(None)
    for found in losses.values():
        assert found == pytest.approx(right, rel=1e-6)


def test_gradient_that_is_assigned_or_that_a_hook_sees_is_the_one_that_counts():
    net = network(torch.float32)
    optimizer = optim.SGD(net.parameters(), 1.0, target="cpu")
    seen = []
    net[0].weight.register_hook(seen.append)
    AutoParallel(net).offload_gradients(optimizer)
    net(torch.ones(2, 6)).sum().backward()
    assert len(seen) == 1
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 1)


def test_schedulers_closures_and_calls_with_gradients_work():
    net = network()
    optimizer = optim.SGD(net.parameters(), 1.0, target="cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = net[0].weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = net[0].weight.sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == pytest.approx(float(before.sum()))
    scheduler.step()
    optimizer([torch.ones_like(parameter) for parameter in net.parameters()])
    torch.testing.assert_close(net[0].weight.detach(), before - 1.5)


class Counting(torch.optim.Optimizer):
    """Looks at its groups twice, by number too, and counts on itself and in a group."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "count": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        total = sum(float(p.grad.sum()) for group in self.param_groups for p in group["params"])
        self.steps += 1
        self.param_groups[0]["count"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=1 / total)


def test_optimizer_of_a_user_may_look_at_its_groups_as_it_likes():
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = Counting([{"params": [weight]} for weight in weights])
    optim.offload(optimizer)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
    assert [weight.tolist() for weight in weights] == [[-0.5, -0.5]] * 2
    assert (optimizer.steps, optimizer.param_groups[0]["count"], optimizer.param_groups[1]["count"]) == (2, 2, 0)


def _count_to(number, done):
    for value in range(number):
        done.append((torch.ones(2) + value).numel())


def test_work_on_fake_tensors_is_done_when_the_caller_goes_on():
    done = []
    with FakeTensorMode() as mode:
        assert active_fake_mode() is mode, "torch's private name"
        HostThread().start(lambda: _count_to(2000, done))
        assert len(done) == 2000, "two threads in one fake mode disturb each other"


def test_collective_that_the_device_does_not_pass_is_named_until_it_does(tmp_path, monkeypatch):
    board = ProgressBoard(tmp_path / "progress", 1)
    board.create()
    monkeypatch.setenv(contract.MSRUN_PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setattr(transfers, "LONG_S", 0.05)
    monkeypatch.setattr(transfers, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_record", None)
    progress.open_record(0)

    def waits_in():
        found = board.read(0)
        return found.name if found.is_waiting else ""

    waited, events = [], [mock.Mock(), mock.Mock()]
    for event in events:
        event.query.return_value = False
    monkeypatch.setattr(torch, "Event", mock.Mock(side_effect=events))
    work = SimpleNamespace(is_completed=lambda: False, wait=lambda *limit: waited.append(limit))
    with FakeTensorMode():
        for name in ("all_gather of 4 ranks", "all_reduce of 2 ranks"):
            transfers.TensorFuture(torch.empty(2, device="cuda"), work, name=name).wait()
    assert [event.record.call_count for event in events] == [1, 1]
    assert waited == [(), ()], "of the device nobody can wait for a while"
    names = []
    work.wait = lambda: names.append(waits_in())
    for operation in ("isend", "irecv"):  # the first message between two ranks waits for the other one
        monkeypatch.setattr(torch.distributed, operation, lambda *_, group: names.append(waits_in()) or work)
    transfers.start_send(torch.ones(2), 3, None, lambda: "activations").wait()
    transfers.start_receive((2,), torch.float32, torch.device("cpu"), 1, None, lambda: "gradients").wait()
    assert names == [*["send of activations to rank 3"] * 2, *["receive of gradients from rank 1"] * 2]
    wait_until(lambda: waits_in() == "all_gather of 4 ranks, result 2, on the device", "what is waited for is told")
    events[0].query.return_value = True
    wait_until(lambda: waits_in() == "all_reduce of 2 ranks, result 2, on the device", "what is waited for is told")
    events[1].query.return_value = True
    wait_until(lambda: waits_in() == "", "what is waited for is told")
    board.close()


def test_copies_of_a_device_have_a_stream_for_each_direction_and_are_waited_for_once(monkeypatch):
    device, streams = torch.device("cuda", 127), mock.MagicMock()
    streams.Stream.side_effect = [streams.there, streams.back]
    streams.current_stream.return_value = streams.own
    monkeypatch.setattr(torch, "get_device_module", {"cuda": streams}.__getitem__)
    monkeypatch.setattr(world, "device", lambda: device)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: stream.reads(x.device))
    monkeypatch.setattr(Tensor, "copy_", lambda to, value, **words: streams.copy(value.device, **words) and to)
    copies = mock.call.copy(device, non_blocking=True), mock.call.copy(torch.device("cpu"), non_blocking=True)
    there = [mock.call.there.wait_stream(streams.own), mock.call.there.reads(device), mock.call.stream(streams.there)]
    there += [copies[0], mock.call.there.record_event(), mock.call.there.record_event().synchronize()]
    back = [mock.call.stream(streams.back), copies[1], mock.call.back.record_event()]
    back += [mock.call.own.wait_event(streams.back.record_event()), mock.call.own.reads(device)]
    transfers.traffic.reset()
    for value, to_host in ((4, True), (5, False)) * 2:
        streams.reset_mock()
        with FakeTensorMode():
            copying = transfers.start_copy(torch.empty(value, device=device if to_host else "cpu"), to_host=to_host)
            copied = copying.wait()
            assert copied is copying.wait() and copied.device == (torch.device("cpu") if to_host else device)
        found = [
            call
            for call in streams.mock_calls
            if "__" not in call[0] and call[0] not in ("Stream", "device", "current_stream")
        ]
        assert found == (there if to_host else back)
    assert transfers.traffic.bytes == {"to_host": 32, "to_device": 40}
