"""Loggers of a training run: rows of rank 0, added to what is there, by Model or by a loop of one's own."""

import csv
import json
import math
import struct
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from msrun import contract
from msrun.errors import ParallelError
from msrun.runtime import CSVLogger, JSONLogger, Model, TensorBoardLogger


def train(*callbacks, epochs=2):
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    data = [(torch.ones(2, 4) * (index + 1), torch.zeros(2, 2)) for index in range(3)]
    Model(network, F.mse_loss, torch.optim.SGD(network.parameters(), 0.01)).train(epochs, data, callbacks)


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_model_logs_every_step_into_csv_and_json(tmp_path):
    train(CSVLogger(tmp_path / "new" / "run.csv"), JSONLogger(tmp_path / "run.jsonl", every=2))
    rows, lines = read_csv(tmp_path / "new" / "run.csv"), read_lines(tmp_path / "run.jsonl")
    assert list(rows[0]) == ["time", "attempt", "step", "loss", "epoch", "learning_rate", "steps_per_s"]
    assert [(row["step"], row["epoch"]) for row in rows] == [(str(n), str(1 + (n > 3))) for n in range(1, 7)]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["loss"] for line in lines] == [float(rows[n - 1]["loss"]) for n in (2, 4, 6)]
    assert all(line["steps_per_s"] > 0 and line["learning_rate"] == 0.01 for line in lines)
    assert float(rows[0]["loss"]) > float(rows[3]["loss"])


def test_restarted_run_adds_rows_that_tell_their_attempt(tmp_path, monkeypatch):
    for attempt in (0, 1):
        monkeypatch.setenv(contract.TORCHELASTIC_RESTART_COUNT, str(attempt))
        train(CSVLogger(tmp_path / "run.csv"), JSONLogger(tmp_path / "run.jsonl"), epochs=1)
    expected = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert [(int(row["attempt"]), int(row["step"])) for row in read_csv(tmp_path / "run.csv")] == expected
    assert [(line["attempt"], line["step"]) for line in read_lines(tmp_path / "run.jsonl")] == expected


def test_line_that_a_crash_has_cut_stays_apart_and_numbers_that_are_not_finite_are_null_or_nan(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with JSONLogger(path) as log, CSVLogger(tmp_path / "run.csv") as table:
        for each in (log, table):
            each.log_metrics({"loss": math.nan, "norm": math.inf}, 2)
        assert path.read_text().count("\n") == 3  # at once, not when it is closed
    first, cut, last = path.read_text().splitlines()
    assert (first, cut) == ('{"step": 1}', '{"st')
    assert (json.loads(last)["loss"], json.loads(last)["norm"]) == (None, None)
    assert [row["loss"] for row in read_csv(tmp_path / "run.csv")] == ["nan"]


@pytest.mark.parametrize(("rank", "plain", "own"), [("0", True, True), ("3", False, True)])
def test_rank_0_alone_logs_unless_all_are_to(tmp_path, monkeypatch, rank, plain, own):
    monkeypatch.setenv(contract.RANK, rank)
    for all_ranks in (False, True):
        with CSVLogger(tmp_path / "run.csv", all_ranks=all_ranks) as log:
            log.log_metrics({"loss": torch.tensor(0.25), "is_best": True}, 7)
    assert (tmp_path / "run.csv").exists() is plain
    assert (tmp_path / f"run.rank_{rank}.csv").exists() is own
    row = read_csv(tmp_path / f"run.rank_{rank}.csv")[0]
    assert (row["step"], row["loss"], row["is_best"]) == ("7", "0.25", "True")


def test_columns_of_a_csv_file_stay_and_a_missing_metric_is_an_empty_cell(tmp_path):
    with CSVLogger(tmp_path / "run.csv") as log:
        log.log_metrics({"loss": 1, "accuracy": 0.5}, 1)
        log.log_metrics({"loss": 2}, 2)
        with pytest.raises(ParallelError, match="lr: the columns of the file are time, attempt, step, loss, accuracy;"):
            log.log_metrics({"loss": 3, "lr": 0.1}, 3)
    assert [row["accuracy"] for row in read_csv(tmp_path / "run.csv")] == ["0.5", ""]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ParallelError, match="give another file, or log to a JSONLogger"):
        CSVLogger(tmp_path / "other.csv").log_metrics({"a": 1}, 1)
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("metrics", "pattern"),
    [
        ({"loss": torch.zeros(2, 3)}, "loss is a tensor of 2x3 elements; give a number or a tensor of one element"),
        ({"loss": "low"}, "loss is 'low'; give a number"),
        ({"loss": None}, "loss is None; give a number"),
        ({"step": 4}, "step: every row has these; give another name"),
    ],
)
def test_what_is_no_number_is_an_error_in_one_line(tmp_path, metrics, pattern):
    with pytest.raises(ParallelError, match=pattern):
        JSONLogger(tmp_path / "run.jsonl").log_metrics(metrics, 1)


def test_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ParallelError, match=r"CSVLogger\('.*file/run.csv'\): cannot write .*; give a file that may"):
        CSVLogger(tmp_path / "file" / "run.csv").log_metrics({"loss": 1}, 1)
    for every in (0, True, 1.5):
        with pytest.raises(ParallelError, match="a whole number of steps, 1 or more"):
            CSVLogger(tmp_path / "run.csv", every=every)


def test_tensorboard_gets_an_event_file_for_every_run_and_forgets_the_steps_that_are_done_again(tmp_path):
    pytest.importorskip("tensorboardX")
    train(TensorBoardLogger(tmp_path / "runs"))
    with TensorBoardLogger(tmp_path / "runs") as log:
        log.log_metrics({"loss": 9.0, "eval/accuracy": 0.5}, 4)
    first, second = sorted((read_events(path) for path in (tmp_path / "runs").iterdir()), key=lambda e: e[0].wall_time)
    losses = {event.step: value for event, tag, value in scalars(first) if tag == "loss"}
    assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[1] > losses[4]
    assert {tag for _, tag, _ in scalars(first)} == {"loss", "epoch", "learning_rate", "steps_per_s"}
    assert not any(event.HasField("session_log") for event in first)
    assert [event.step for event in second if event.HasField("session_log")] == [4]
    assert [(tag, value) for _, tag, value in scalars(second)] == [("loss", 9.0), ("eval/accuracy", 0.5)]
    (tmp_path / "file").touch()
    with pytest.raises(ParallelError, match=r"TensorBoardLogger\('.*file/runs'\): cannot write .*; give a directory"):
        TensorBoardLogger(tmp_path / "file" / "runs").log_metrics({"loss": 1}, 1)


def read_events(path):
    """Return the events of a file of TFRecords: length, its checksum, an Event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[12 + size + 4 :]
    return events


def scalars(events):
    return [(event, value.tag, value.simple_value) for event in events for value in event.summary.value]


def test_missing_writer_is_an_error_of_one_line_with_the_command_to_run(tmp_path, monkeypatch):
    for name in ("tensorboardX", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ParallelError, match=r"^TensorBoardLogger: neither .* run: pip install 'msrun\[tensorboard\]'$"):
        TensorBoardLogger(tmp_path / "runs")
    assert not list(tmp_path.iterdir())
