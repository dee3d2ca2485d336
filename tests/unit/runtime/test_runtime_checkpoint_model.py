"""ModelCheckpoint and Model.train(resume_from=...): a run cut anywhere ends with the numbers of an undisturbed one."""

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from asked_cases import every_third_fast
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from msrun.data import NumpySlicesDataset
from msrun.errors import CheckpointError, ParallelError
from msrun.runtime import (
    Callback,
    CheckpointConfig,
    LossMonitor,
    Model,
    ModelCheckpoint,
    latest_checkpoint,
    load_checkpoint,
)

EPOCHS, BATCHES = 3, 4
GENERATOR = np.random.RandomState(0)
IMAGES = GENERATOR.rand(2 * BATCHES, 4).astype(np.float32)
LABELS = GENERATOR.rand(2 * BATCHES, 2).astype(np.float32)


class Stream:
    """Data without a length."""

    def __iter__(self):
        return iter(as_list())


def as_list():
    return list(zip(torch.tensor(IMAGES).split(2), torch.tensor(LABELS).split(2), strict=True))


DATA = {
    "own dataset": lambda: NumpySlicesDataset((IMAGES, LABELS), ["x", "y"]).batch(2),
    "its iterator": lambda: NumpySlicesDataset((IMAGES, LABELS), ["x", "y"]).batch(2).create_tuple_iterator(),
    "list": as_list,
    "stream": Stream,
    "shuffling loader": lambda: DataLoader(
        TensorDataset(torch.tensor(IMAGES), torch.tensor(LABELS)), batch_size=2, shuffle=True
    ),
}


def model():
    """A network whose dropout draws random numbers in every step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    return Model(network, F.mse_loss, torch.optim.Adam(network.parameters(), 0.05))


class Losses(Callback):
    """Writes down every loss with its place, and ends the process's training at a step."""

    def __init__(self, dies_after=-1):
        self.lines: list[tuple[int, int, int, float]] = []
        self.dies_after = dies_after

    def on_train_step_begin(self, context):
        if context.cur_step_num == self.dies_after:
            raise KeyboardInterrupt

    def on_train_step_end(self, context):
        self.lines.append((context.cur_epoch_num, context.step_in_epoch, context.cur_step_num, context.loss))


@pytest.mark.parametrize("dies_after", [1, 3, 4, 7, 8, 11])
@pytest.mark.parametrize("data", every_third_fast(DATA))
def test_run_cut_after_any_step_goes_on_with_the_same_losses(tmp_path, logged, data, dies_after):
    right = Losses()
    model().train(EPOCHS, DATA[data](), right)
    config = CheckpointConfig(
        save_checkpoint_steps=3, keep_checkpoint_max=2, integrated_save=dies_after % 2 == 1, async_save=dies_after > 4
    )
    first, second = Losses(dies_after), Losses()
    with pytest.raises(KeyboardInterrupt):
        model().train(EPOCHS, DATA[data](), [ModelCheckpoint(directory=tmp_path, config=config), first])
    torch.rand(7)  # the new process has drawn other numbers
    callbacks = [ModelCheckpoint(directory=tmp_path, config=config), second]
    model().train(EPOCHS, DATA[data](), callbacks, resume_from=latest_checkpoint(tmp_path))
    assert first.lines == right.lines[:dies_after]
    assert second.lines == right.lines[dies_after // 3 * 3 :]
    assert logged == []


def test_checkpoint_of_a_finished_run_has_nothing_left_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model().train(EPOCHS, as_list(), ModelCheckpoint(config=CheckpointConfig(5)))
    newest = latest_checkpoint(tmp_path)
    assert newest == tmp_path / "CKP-3_4.ckpt", "the last step is saved although 5 does not divide it"
    again, callback = Losses(), ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(5))
    model().train(EPOCHS, as_list(), [again, callback], resume_from=newest)
    assert again.lines == []
    assert callback.latest_ckpt_file_name == ""
    with pytest.raises(ParallelError, match="the checkpoint says where to go on; give one of them"):
        model().train(4, as_list(), initial_epoch=1, resume_from=newest)


def test_more_epochs_go_on_from_a_finished_run(tmp_path):
    right, more = Losses(), Losses()
    model().train(EPOCHS, DATA["own dataset"](), right)
    model().train(1, DATA["own dataset"](), ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(100)))
    model().train(EPOCHS, DATA["own dataset"](), more, resume_from=tmp_path / "CKP-1_4.ckpt")
    assert more.lines == right.lines[BATCHES:]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(), ["2_4", "3_1", "3_2", "3_3", "3_4"]),
        (CheckpointConfig(5), ["2_1", "3_2", "3_4"]),
        (CheckpointConfig(2, keep_checkpoint_max=2), ["3_2", "3_4"]),
        (CheckpointConfig(1, keep_checkpoint_max=0), ["3_4"]),
        (CheckpointConfig(1, keep_checkpoint_max=0, keep_checkpoint_per_n_minutes=10), ["1_1", "3_4"]),
        (CheckpointConfig(100), ["3_4"]),
    ],
)
def test_names_and_number_of_checkpoints(tmp_path, config, kept):
    (tmp_path / "new" / "net-1_1.ckpt.saving").mkdir(parents=True)  # half written by a job before
    callback = ModelCheckpoint("net", tmp_path / "new", config)
    model().train(EPOCHS, as_list(), callback)
    assert sorted(os.listdir(tmp_path / "new")) == [f"net-{place}.ckpt" for place in kept]
    assert callback.latest_ckpt_file_name == str(tmp_path / "new" / "net-3_4.ckpt")


def test_old_checkpoint_goes_after_the_new_one_is_complete(tmp_path, monkeypatch):
    from msrun.runtime.checkpoint import save as writing

    saving = ModelCheckpoint(directory=tmp_path, config=CheckpointConfig(keep_checkpoint_max=1))
    with pytest.raises(KeyboardInterrupt):
        model().train(1, as_list(), [saving, Losses(dies_after=1)])
    give_name = writing.give_name

    def fail(temporary, final):
        assert (tmp_path / "CKP-1_1.ckpt").is_file()
        if final.name == "CKP-1_2.ckpt":
            raise OSError(28, "No space left on device")
        give_name(temporary, final)

    monkeypatch.setattr(writing, "give_name", fail)
    with pytest.raises(CheckpointError, match=r"CKP-1_2.ckpt was not saved, earlier ones are untouched: No space left"):
        model().train(1, as_list(), saving, resume_from=tmp_path / "CKP-1_1.ckpt")
    assert os.listdir(tmp_path) == ["CKP-1_1.ckpt"]
    monkeypatch.undo()
    model().train(1, as_list(), saving, resume_from=latest_checkpoint(tmp_path))
    assert os.listdir(tmp_path) == ["CKP-1_4.ckpt"]


def test_training_anew_in_a_used_directory_keeps_its_own_checkpoints(tmp_path):
    """Those of the longer run before are older, although they are further."""
    config = CheckpointConfig(keep_checkpoint_max=2)
    model().train(3, as_list(), ModelCheckpoint(directory=tmp_path, config=config))
    model().train(1, as_list(), ModelCheckpoint(directory=tmp_path, config=config))
    assert sorted(os.listdir(tmp_path)) == ["CKP-1_3.ckpt", "CKP-1_4.ckpt"]
    assert latest_checkpoint(tmp_path) == tmp_path / "CKP-1_4.ckpt"


def test_checkpoints_by_seconds(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Clock(Callback):
        def on_train_step_end(self, _context):
            now[0] += 4.0

    config = CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=10, keep_checkpoint_max=9)
    model().train(2, as_list(), [Clock(), ModelCheckpoint(directory=tmp_path, config=config)])
    assert sorted(os.listdir(tmp_path)) == ["CKP-1_3.ckpt", "CKP-2_2.ckpt", "CKP-2_4.ckpt"]


def test_step_that_diverged_is_not_saved(tmp_path):
    """A restart would go on from it for ever."""
    data = [*as_list()[:2], (torch.full((2, 4), math.inf), torch.zeros(2, 2))]
    with pytest.raises(ParallelError, match="training has diverged"):
        model().train(1, data, [ModelCheckpoint(directory=tmp_path), LossMonitor(0)])
    assert latest_checkpoint(tmp_path) == tmp_path / "CKP-1_2.ckpt"


def test_appended_information_comes_with_every_checkpoint(tmp_path):
    config = CheckpointConfig(append_info={"data": "digits"})
    model().train(1, as_list(), ModelCheckpoint(directory=tmp_path, config=config))
    loaded = load_checkpoint(tmp_path / "CKP-1_3.ckpt", model().network)
    assert loaded == {"data": "digits", "epoch_num": 0, "step_in_epoch": 3, "step_num": 3}
    assert load_checkpoint(tmp_path / "CKP-1_4.ckpt", model().network)["epoch_num"] == 1


def test_later_initial_epoch_reads_the_data_of_that_epoch():
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    for first in (0, 2):
        network = Spy(4, 2)
        trained = Model(network, F.mse_loss, torch.optim.SGD(network.parameters(), 0.0))
        trained.train(EPOCHS, DATA["own dataset"](), initial_epoch=first)
    whole, later = seen[: EPOCHS * BATCHES], seen[EPOCHS * BATCHES :]
    assert all(torch.equal(a, b) for a, b in zip(later, whole[2 * BATCHES :], strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda p=prefix: ModelCheckpoint(p), "begin a file name, without a slash")
            for prefix in ("", "a/b", ".b", 3)
        ),
        *(
            (lambda v=value: CheckpointConfig(v), "CheckpointConfig(save_checkpoint_steps=")
            for value in (-1, 1.5, "3", True, None)
        ),
        (lambda: CheckpointConfig(save_checkpoint_seconds=-1), "seconds=-1): must be a whole number, 0 or"),
        (lambda: CheckpointConfig(keep_checkpoint_max=-1), "CheckpointConfig(keep_checkpoint_max=-1)"),
        (lambda: CheckpointConfig(save_checkpoint_steps=0), "nothing would be written; give one of them"),
        (lambda: CheckpointConfig(async_save="fast"), 'must be True, False, "thread" or "process"'),
    ],
)
def test_settings_that_cannot_be_are_refused(make, words):
    with pytest.raises(CheckpointError) as caught:
        make()
    assert words in str(caught.value)


def test_own_datasets_begin_behind_the_steps_that_are_done():
    dataset = DATA["own dataset"]()
    whole = [[batch[0] for batch in dataset] for _ in range(3)]
    for epoch in range(3):
        for step in range(BATCHES + 1):
            dataset.set_epoch(epoch, step)
            assert [b[0].tolist() for b in dataset] == [b.tolist() for b in whole[epoch][step:]]
            if epoch < 2:
                assert [b[0].tolist() for b in dataset] == [b.tolist() for b in whole[epoch + 1]], "whole again"
    iterator = dataset.create_tuple_iterator(num_epochs=3)
    iterator.set_epoch(1, 2)
    assert [[b[0].tolist() for b in iterator] for _ in range(3)] == [
        [b.tolist() for b in whole[1][2:]],
        [b.tolist() for b in whole[2]],
        [],
    ]
