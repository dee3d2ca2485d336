"""Model and its callbacks."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import contract
from msrun.agent.watch.progress_board import ProgressBoard
from msrun.errors import ParallelError, UsageError
from msrun.runtime import (
    AUC,
    Accuracy,
    AutoParallel,
    Callback,
    CheckpointConfig,
    EarlyStopping,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    RunContext,
    SoftmaxCrossEntropyExpand,
    TimeMonitor,
    WithLoss,
    latest_checkpoint,
    progress,
)


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


def test_a_loader_of_torch_is_told_the_epoch_and_its_dataset_alone_is_refused() -> None:
    pairs = TensorDataset(torch.ones(6, 4), torch.zeros(6, 2))
    sampler = DistributedSampler(pairs, 2, 0)
    model().train(3, DataLoader(pairs, 1, sampler=sampler))
    assert sampler.epoch == 2
    with pytest.raises(UsageError, match=r"TensorDataset is a torch Dataset, .* give a DataLoader, or Gener"):
        model().train(1, pairs)  # type: ignore[arg-type]


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
    context = RunContext(model(), 1, 200, cur_epoch_num=1, cur_step_num=100, step_in_epoch=100, net_outputs=4.5140)
    LossMonitor(100).on_train_step_end(context)
    assert capsys.readouterr().out == "epoch: 1 step: 100, loss is 4.514\n"


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 1, 2, 3]), (2, [2, 1, 3]), (6, [3]), (7, []), (0, [])])
def test_loss_monitor_prints_every_so_many_steps(
    every: int, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    model().train(2, data(3), LossMonitor(every))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("step: ")[1].split(",")[0]) for line in lines] == steps


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("callbacks", [None, LossMonitor(0)])
def test_loss_that_is_not_finite_ends_the_training(value: float, callbacks: Callback | None) -> None:
    steps = [*data(1), (torch.full((2, 4), value), torch.zeros(2, 2))]
    with pytest.raises(ParallelError, match=r"rank 0: epoch: 1 step: 2, loss is (nan|inf): training has diverged"):
        model().train(1, steps, callbacks)


def test_on_an_accelerator_a_loss_that_is_not_finite_is_found_without_waiting_in_every_step() -> None:
    context = RunContext(model(), 1, 3)
    context._first_bad = torch.zeros((), dtype=torch.int64)
    context._first_bad = torch.where(~torch.isfinite(torch.tensor(math.nan)), 2, context._first_bad)
    with pytest.raises(ParallelError, match="the loss of step 2 is not finite"):
        context.check_finite()


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


class Losses(Callback):
    """Notes where the training is whenever a step's end is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self.losses: list[float] = []

    def on_train_step_end(self, context: RunContext) -> None:
        self.seen.append((context.cur_epoch_num, context.step_in_epoch, context.cur_step_num))
        self.losses.append(context.loss)


def test_sink_mode_tells_callbacks_once_an_epoch_and_trains_the_same() -> None:
    step_by_step, sunk = Losses(), Losses()
    model().train(2, data(3), step_by_step)
    trained = model()
    trained.train(2, data(3), sunk, dataset_sink_mode=True)
    assert sunk.seen == [(1, 3, 3), (2, 3, 6)]
    assert sunk.losses == [step_by_step.losses[2], step_by_step.losses[5]]


def test_sink_mode_prints_the_line_of_mindspores_document(capsys: pytest.CaptureFixture[str]) -> None:
    model().train(2, data(3), LossMonitor(), dataset_sink_mode=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", loss is")[0] for line in lines] == ["epoch: 1 step: 3", "epoch: 2 step: 3"]


def test_sink_size_is_the_length_of_an_epoch_and_the_data_goes_round() -> None:
    step_by_step, sunk = Losses(), Losses()
    model().train(3, data(3), step_by_step)
    model().train(4, data(3), sunk, dataset_sink_mode=True, sink_size=2)
    assert sunk.seen == [(1, 2, 2), (2, 2, 4), (3, 2, 6), (4, 2, 8)]
    assert sunk.losses == [step_by_step.losses[index] for index in (1, 3, 5, 7)]


@pytest.mark.parametrize("size", [0, -2, 1.5])
def test_sink_size_out_of_range_is_refused(size: Any) -> None:
    with pytest.raises(ParallelError, match="a whole number of steps, or -1 for all"):
        model().train(1, data(), dataset_sink_mode=True, sink_size=size)


def test_data_of_dicts_and_networks_that_return_their_loss_first_train() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.layer(x)
            return F.mse_loss(scores, y), scores

    torch.manual_seed(0)
    network, losses = Named(), Losses()
    Model(network, optimizer=torch.optim.SGD(network.parameters(), 0.1)).train(
        1, [{"x": x, "y": y} for x, y in data()], losses
    )
    assert losses.losses[2] < losses.losses[0] * 9  # x of step 3 is three times as large


def test_network_without_a_loss_is_refused() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"scores": super().forward(x)}

    network = Odd(4, 2)
    with pytest.raises(ParallelError, match="the network returned dict, not a loss: give Model a loss_fn"):
        Model(network, optimizer=torch.optim.SGD(network.parameters(), 0.1)).train(1, [(torch.ones(1, 4),)])


def classes() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 6))
    return network, [(torch.randn(5, 4), torch.randint(0, 6, (5,), dtype=torch.int32)) for _ in range(3)]


def test_eval_counts_over_all_batches_and_leaves_the_network_training() -> None:
    network, batches = classes()
    loss = nn.CrossEntropyLoss()
    trained = Model(network, loss, metrics={"accuracy", "loss", "top_1_accuracy", "top_5_accuracy"})
    values = trained.eval(batches)
    assert network.training
    network.eval()
    scores, labels = torch.cat([network(x) for x, _ in batches]), torch.cat([y for _, y in batches]).long()
    assert values["accuracy"] == values["top_1_accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean())
    assert values["top_5_accuracy"] == pytest.approx((scores.argmin(1) != labels).double().mean())
    assert values["loss"] == pytest.approx(loss(scores, labels).item(), rel=1e-6)


def test_metrics_of_torchmetrics_form_and_one_hot_labels_are_taken() -> None:
    class Highest:
        def reset(self) -> None:
            self.value = -math.inf

        def update(self, outputs: Tensor, label: Tensor) -> None:
            self.value = max(self.value, float(outputs.max()))

        def compute(self) -> Tensor:
            return torch.tensor(self.value)

    network, batches = classes()
    hot = [(x, F.one_hot(y.long(), 6).float()) for x, y in batches]
    values = Model(network, nn.CrossEntropyLoss(), metrics={"high": Highest(), "acc": Accuracy()}).eval(hot)
    assert values["acc"] == Model(network, nn.CrossEntropyLoss(), metrics="acc").eval(batches)["acc"]
    network.eval()
    assert values["high"] == pytest.approx(max(network(x).max().item() for x, _ in batches))


@pytest.mark.parametrize("from_logits", [False, True])
def test_auc_is_the_share_of_pairs_in_the_right_order(*, from_logits: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(300, generator=draw), torch.randint(2, (300,), generator=draw).float()
    scores = (scores + labels).round(decimals=1)  # so that some are equal
    metric = AUC(from_logits=from_logits)
    for part, of_part in zip(scores.split(64), labels.split(64), strict=True):
        metric.update(None, (part if from_logits else part.sigmoid()).unsqueeze(1), of_part)
    high, low = scores[labels == 1].unsqueeze(1), scores[labels == 0]
    right = ((high > low).float() + (high == low).float() / 2).mean().item()
    assert metric.eval() == pytest.approx(right, abs=1e-6)
    metric.clear()
    metric.update(None, torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert metric.eval() == 1.0


def test_auc_refuses_what_it_cannot_count() -> None:
    metric = AUC()
    with pytest.raises(ParallelError, match=r"a score for each label, got \(2, 2\) and \(2,\)"):
        metric.update(None, torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(ParallelError, match="from_logits=True"):
        metric.update(None, torch.tensor([-1.0]), torch.zeros(1))
    with pytest.raises(ParallelError, match="labels must be 0 or 1"):
        metric.update(None, torch.tensor([0.5]), torch.tensor([2]))
    metric.update(None, torch.tensor([0.5]), torch.tensor([1]))
    with pytest.raises(ParallelError, match="samples of both classes"):
        metric.eval()


def test_wrong_metrics_are_refused() -> None:
    network, batches = classes()
    with pytest.raises(ParallelError, match=r"unknown metric.*accuracy.*known are"):
        Model(network, nn.CrossEntropyLoss(), metrics={"acuracy"})
    with pytest.raises(ParallelError, match="no metric; give Accuracy"):
        Model(network, nn.CrossEntropyLoss(), metrics={"a": 3})
    with pytest.raises(ParallelError, match="no metrics; give Model"):
        Model(network, nn.CrossEntropyLoss()).eval(batches)
    with pytest.raises(ParallelError, match="its outputs are not known; give Model a loss_fn"):
        Model(network, metrics={"acc"}).eval(batches)
    with pytest.raises(ParallelError, match=r"labels \(4,\) do not fit scores \(5, 6\)"):
        Model(network, lambda scores, label: scores.mean(), metrics="acc").eval([(torch.randn(5, 4), torch.zeros(4))])


def test_eval_network_of_the_user_says_where_loss_outputs_and_label_are() -> None:
    network, batches = classes()

    class Turned(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scores = network(x)
            return y, F.cross_entropy(scores, y.long()), scores

    own = Model(network, eval_network=Turned(), eval_indexes=(1, 2, 0), metrics={"acc", "loss"}).eval(batches)
    network.eval()
    assert own == pytest.approx(Model(network, nn.CrossEntropyLoss(), metrics={"acc", "loss"}).eval(batches))


def test_predict_leaves_the_loss_out() -> None:
    network, batches = classes()
    trained = Model(network, nn.CrossEntropyLoss())
    scores = trained.predict(batches[0][0])
    assert network.training
    assert torch.equal(scores, network.eval()(batches[0][0]))
    assert not scores.requires_grad


def test_fit_evaluates_between_epochs_and_early_stopping_listens() -> None:
    network, batches = classes()
    trained = Model(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), 0.0), {"loss"})
    told: list[tuple[int, float]] = []

    class Look(Callback):
        def on_train_epoch_end(self, context: RunContext) -> None:
            told.append((context.cur_epoch_num, context.metrics.get("eval_loss", math.nan)))

    trained.fit(9, batches, batches, callbacks=[EarlyStopping("eval_loss", patience=1), Look()])
    assert [epoch for epoch, _ in told] == [1, 2, 3]  # the rate is 0: nothing improves after the first
    told.clear()
    trained.fit(4, batches, batches, valid_frequency=[2], callbacks=Look())
    assert [math.isnan(value) for _, value in told] == [True, False, False, False]


@pytest.mark.parametrize("monitor", ["eval_accuracy", "loss"])
def test_early_stopping_knows_which_way_is_better(monitor: str) -> None:
    stopping = EarlyStopping(monitor, patience=0)
    context = RunContext(None, 9, 1)
    better = -1.0 if monitor == "loss" else 1.0
    for value, stops in ((0.5, False), (0.5 + 0.1 * better, False), (0.5, True)):
        context.net_outputs, context.metrics = value, {"eval_accuracy": value}
        stopping.on_train_epoch_end(context)
        assert context.stop_requested == stops


def test_early_stopping_names_what_it_could_monitor() -> None:
    with pytest.raises(ParallelError, match="known are loss, eval_acc"):
        EarlyStopping("eval_los").on_train_epoch_end(RunContext(None, 1, 1, metrics={"eval_acc": 1.0}))


def test_learning_rate_follows_a_function_or_a_scheduler_of_torch() -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_train_step_begin(self, context: RunContext) -> None:
            rates.append(context.optimizer.param_groups[0]["lr"])

    trained = model(0.1)
    trained.train(1, data(3), [LearningRateScheduler(lambda rate, step: rate / (1 + step)), Rates()])
    assert rates == pytest.approx([0.1, 0.05, 0.05 / 3])
    for per, expected in (("step", [0.1, 0.05, 0.025, 0.0125]), ("epoch", [0.1, 0.1, 0.05, 0.05])):
        rates.clear()
        trained = model(0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5)
        trained.train(2, data(2), [LearningRateScheduler(scheduler, per=per), Rates()])
        assert rates == pytest.approx(expected)


def test_callbacks_in_mindspores_older_words_are_called() -> None:
    class Old(Callback):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def begin(self, run_context: RunContext) -> None:
            self.told.append("begin")

        def step_end(self, run_context: RunContext) -> None:
            args = run_context.original_args()
            self.told.append((args.cur_epoch_num, args.batch_num, args.cur_step_num, args.net_outputs.item()))
            if args.cur_step_num == 2:
                run_context.request_stop()

        def end(self, run_context: RunContext) -> None:
            self.told.append(run_context.get_stop_requested())

    old = Old()
    model().train(1, data(3), old)
    assert [told[:3] if isinstance(told, tuple) else told for told in old.told] == ["begin", (1, 3, 1), (1, 3, 2), True]


def test_time_monitor_prints_how_long_an_epoch_took(capsys: pytest.CaptureFixture[str]) -> None:
    model().train(2, data(3), TimeMonitor())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"Train epoch time: [\d.]+ ms, per step time: [\d.]+ ms", lines[0])


def test_signal_ends_the_training_one_step_later_with_a_checkpoint(tmp_path: Path) -> None:
    class Send(Callback):
        def on_train_step_begin(self, context: RunContext) -> None:
            if context.cur_step_num == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    losses = Losses()
    callbacks = [OnRequestExit(directory=tmp_path, sig=signal.SIGUSR1), Send(), losses]
    model().train(5, data(3), callbacks)
    assert losses.seen[-1] == (1, 3, 3)
    assert signal.getsignal(signal.SIGUSR1) is before
    again, whole = Losses(), Losses()
    model().train(5, data(3), again, resume_from=latest_checkpoint(tmp_path))
    model().train(5, data(3), whole)
    assert losses.losses + again.losses == whole.losses


def test_file_ends_the_training_too(tmp_path: Path) -> None:
    config, losses = tmp_path / "exit.json", Losses()

    class Write(Callback):
        def on_train_step_begin(self, context: RunContext) -> None:
            config.write_text("{" if context.cur_step_num == 0 else '{"GracefulExit": 1}')

    model().train(5, data(3), [OnRequestExit(save_ckpt=False, config_file=config, sig=None), Write(), losses])
    assert losses.seen[-1] == (1, 3, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]
    with pytest.raises(ParallelError, match="nobody could ask"):
        OnRequestExit(sig=None)


@pytest.mark.parametrize("label", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, SoftmaxCrossEntropyExpand(sparse=True)])
def test_labels_of_any_integer_type_train(label: torch.dtype, loss: Any) -> None:
    network, batches = classes()
    losses = Losses()
    Model(network, loss, torch.optim.SGD(network.parameters(), 0.1)).train(
        1, [(x, y.to(label)) for x, y in batches], losses
    )
    assert len(losses.losses) == 3


def test_amp_level_computes_in_16_bits_and_unknown_levels_are_refused() -> None:
    seen: list[torch.dtype] = []
    network, batches = classes()
    network[2].register_forward_hook(lambda _module, _inputs, result: seen.append(result.dtype))
    trained = Model(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), 0.1), amp_level="O2")
    trained.train(1, batches)
    assert set(seen) == {torch.float16}
    assert network[2].weight.dtype == torch.float32
    for level in ("O3", "o2"):
        with pytest.raises(ParallelError, match="one of O0, O1, O2, auto"):
            Model(network, amp_level=level)


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


def test_callbacks_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """A scheduler of torch and the patience of an early stop, cut after two of four epochs."""

    def run(epochs: int, **more: Any) -> tuple[list[float], int]:
        trained, rates = model(0.1), []

        class Rates(Callback):
            def on_train_step_begin(self, context: RunContext) -> None:
                rates.append(context.optimizer.param_groups[0]["lr"])

        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 3, 0.5)
        stopping = EarlyStopping("loss", min_delta=1e9, patience=2)
        saving = ModelCheckpoint("net", tmp_path, CheckpointConfig(save_checkpoint_steps=2))
        trained.train(epochs, data(2), [LearningRateScheduler(scheduler), stopping, Rates(), saving], **more)
        return rates, len(rates)

    whole, steps = run(9)
    assert steps == 8, "the first epoch is an improvement, then three are not"
    for path in tmp_path.iterdir():
        path.unlink()
    first, _ = run(2)
    second, _ = run(9, resume_from=latest_checkpoint(tmp_path))
    assert first + second == whole
