"""Model and its callbacks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from msrun import contract
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.errors import ParallelError
from msrun.runtime import AutoParallel, Callback, LossMonitor, Model, RunContext, WithLoss, progress


def data(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(2, 4) * (index + 1), torch.zeros(2, 2)) for index in range(count)]


def model(lr: float = 0.01) -> Model:
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    return Model(network, F.mse_loss, torch.optim.SGD(network.parameters(), lr))


def test_training_is_reported_to_msrun_without_init_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = ProgressBoard(tmp_path / "progress", 2)
    board.create()
    monkeypatch.setenv(contract.RANK, "1")
    monkeypatch.setenv(contract.MSRUN_PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setattr(progress, "_is_looked_for", False)
    monkeypatch.setattr(progress, "_record", None)
    model().train(2, data(3))
    told = board.read(1)
    assert (told.steps, told.total) == (6, 6)
    assert told.steps_per_s(told.step_at) is not None
    model().train(5, data(3), initial_epoch=3)
    assert (board.read(1).steps, board.read(1).total) == (6, 6)
    board.close()


class Recorder(Callback):
    """Writes down every moment."""

    def __init__(self, name: str, moments: list[str]) -> None:
        self.name = name
        self.moments = moments

    def _note(self, moment: str, context: RunContext) -> None:
        place = f"{context.cur_epoch_num}.{context.step_in_epoch}/{context.cur_step_num}"
        self.moments.append(f"{self.name} {moment} {place}")

    def on_train_begin(self, context: RunContext) -> None:
        self._note("train begin", context)

    def on_train_epoch_begin(self, context: RunContext) -> None:
        self._note("epoch begin", context)

    def on_train_step_end(self, context: RunContext) -> None:
        self._note("step end", context)

    def on_train_epoch_end(self, context: RunContext) -> None:
        self._note("epoch end", context)

    def on_train_end(self, context: RunContext) -> None:
        self._note("train end", context)


def test_training_is_the_plain_torch_loop() -> None:
    trained = model(0.1)
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    trained.train(2, data())
    for _ in range(2):
        for x, y in data():
            F.mse_loss(network(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(trained.network.network.weight, network.weight)


def test_callbacks_are_told_in_order() -> None:
    moments: list[str] = []
    model().train(2, data(2), [Recorder("a", moments), Recorder("b", moments)])
    assert [moment for moment in moments if moment.startswith("a")] == [
        "a train begin 0.0/0",
        "a epoch begin 1.0/0",
        "a step end 1.1/1",
        "a step end 1.2/2",
        "a epoch end 1.2/2",
        "a epoch begin 2.0/2",
        "a step end 2.1/3",
        "a step end 2.2/4",
        "a epoch end 2.2/4",
        "a train end 2.2/4",
    ]
    assert [moment[2:] for moment in moments[::2]] == [moment[2:] for moment in moments[1::2]]
    assert [moment[0] for moment in moments] == ["a", "b"] * 10


def test_context_tells_epochs_batches_and_loss() -> None:
    seen: list[Any] = []

    class Look(Callback):
        def on_train_step_end(self, context: RunContext) -> None:
            seen.append((context.epoch_num, context.batch_num, context.loss))

    trained = model()
    x, y = data(1)[0]
    first = F.mse_loss(trained.network.network(x), y).item()
    trained.train(1, data(1), Look())
    assert seen == [(1, 1, pytest.approx(first))]


def test_data_without_length_is_taken() -> None:
    class Stream:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(data(2))

    moments: list[str] = []
    model().train(1, Stream(), Recorder("a", moments))
    assert len([moment for moment in moments if "step end" in moment]) == 2


def test_training_goes_on_from_a_later_epoch() -> None:
    moments: list[str] = []
    model().train(3, data(1), Recorder("a", moments), initial_epoch=2)
    assert [moment for moment in moments if "epoch begin" in moment] == ["a epoch begin 3.0/0"]


def test_stop_ends_after_the_step() -> None:
    class Stop(Callback):
        def on_train_step_end(self, context: RunContext) -> None:
            if context.cur_step_num == 4:
                context.request_stop()

    moments: list[str] = []
    model().train(5, data(3), [Stop(), Recorder("a", moments)])
    assert moments[-3:] == ["a step end 2.1/4", "a epoch end 2.1/4", "a train end 2.1/4"]


def test_loss_monitor_prints_mindspores_line(capsys: pytest.CaptureFixture[str]) -> None:
    context = RunContext(model(), 1, 200, cur_epoch_num=1, cur_step_num=100, step_in_epoch=100, loss=4.5140)
    LossMonitor(100).on_train_step_end(context)
    assert capsys.readouterr().out == "epoch: 1 step: 100, loss is 4.514\n"


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 1, 2, 3]), (2, [2, 1, 3]), (6, [3]), (7, []), (0, [])])
def test_loss_monitor_prints_every_so_many_steps(
    every: int, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    model().train(2, data(3), LossMonitor(every))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("step: ")[1].split(",")[0]) for line in lines] == steps


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("every", [0, 1])
def test_loss_that_is_not_finite_ends_the_training(loss: float, every: int) -> None:
    context = RunContext(model(), 1, 1, cur_epoch_num=1, cur_step_num=1, step_in_epoch=1, loss=loss)
    with pytest.raises(ParallelError, match=f"epoch: 1 step: 1, loss is {loss}: training has diverged; lower the"):
        LossMonitor(every).on_train_step_end(context)


@pytest.mark.parametrize("every", [-1, 1.5, "1"])
def test_loss_monitor_refuses_an_interval_that_is_no_whole_number(every: Any) -> None:
    with pytest.raises(ParallelError, match="a whole number, 0 or more"):
        LossMonitor(every)


def test_model_without_optimizer_cannot_train_but_predict() -> None:
    network = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    alone = Model(network)
    with pytest.raises(ParallelError, match="no optimizer; give Model"):
        alone.train(1, data())
    result = alone.predict(torch.ones(1, 4))
    assert not result.requires_grad
    assert torch.equal(result, network[0](torch.ones(1, 4)))


def test_data_without_a_batch_is_refused() -> None:
    with pytest.raises(ParallelError, match="the dataset yields no batch"):
        model().train(1, [])


def test_loss_of_an_auto_parallel_network_belongs_inside() -> None:
    with pytest.raises(ParallelError, match=r"AutoParallel\(WithLoss\(net, loss\)\)"):
        Model(AutoParallel(nn.Linear(2, 2)), F.mse_loss)


def test_auto_parallel_network_trains_alone_as_it_is() -> None:
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    step = AutoParallel(WithLoss(network, F.mse_loss))
    assert [name for name, _ in step.named_parameters()] == ["weight", "bias"]
    Model(step, optimizer=torch.optim.SGD(step.parameters(), 0.1)).train(2, data())
    right = model(0.1)
    right.train(2, data())
    assert torch.equal(network.weight, right.network.network.weight)
