"""Captures that are kept: a second start reads them, with equal numbers, and whatever is another call is captured."""

import contextlib
import math
import os
import shutil
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from asked_cases import one_fast
from job_runner import WORKER_PATH
from on_ranks import on_ranks
from torch import nn

from msrun import contract
from msrun.runtime import AutoParallel, GradAccumulation, Pipeline, shard
from msrun.runtime.parallel.compilation import kept_captures

WIDTH = 8


def waves(*shape):
    return torch.arange(float(math.prod(shape))).sin().view(shape)


SETTINGS = {"dtype": "float64", "env": {contract.MSRUN_VERIFY: "0"}}  # numbers are compared here
two_ranks, slow_two_ranks = on_ranks(2, **SETTINGS), on_ranks(2, slow=True, **SETTINGS)
READ, KEPT = "read from ", "kept in"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = 1.0
        self.label = "of no interest"

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Network(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.table = torch.arange(float(WIDTH))  # no buffer, and no parameter

    def forward(self, x, twice=False):
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x.flatten(0, 1)) + self.table + torch.tensor([0.5])
        return (x * (2 if twice else 1)).square().mean()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()


def cut(network):
    for layer in network.layers:
        shard(layer.up, ((1, 1, 1), (2, 1)))
        shard(layer.down, ((1, 1, 2), (1, 2)))
    return network


@contextlib.contextmanager
def keeping_in(folder):
    with mock.patch.dict(os.environ, {contract.MSRUN_CAPTURE_CACHE: str(folder)}):
        yield


def start(
    folder,
    network=None,
    *,
    change=lambda network: None,
    settings=lambda step: step,
    batch=(4, 6, WIDTH),
    needs_gradient=False,
    **named,
):
    """Train for a step as a new job would; returns how it came to its program, and its numbers."""
    network, right = (cut(Network()) if network is None else network), Network()
    change(network)
    with keeping_in(folder):
        step = settings(AutoParallel(network).dataset_strategy("full_batch"))
        loss = step(waves(*batch).requires_grad_(needs_gradient), **named)
    loss.backward()
    if type(network) is Network and not named:
        change(right)
        expected = right(waves(*batch))
        expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(network.layers[0].down.bias.grad, right.layers[0].down.bias.grad)
        torch.testing.assert_close(network.norm.running_mean, right.norm.running_mean)
    return step.plan.kept, [loss.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@pytest.mark.slow
def test_a_second_start_of_a_job_reads_and_its_numbers_are_equal(msrun, workers, tmp_path):
    told = []
    for _ in range(2):
        env = {contract.MSRUN_CAPTURE_CACHE: str(tmp_path / "kept"), "PYTHONPATH": WORKER_PATH}
        script = str(workers / "runtime" / "kept_captures.py")
        finished = msrun.run("--worker_num=2", "--quiet", script, cwd=tmp_path, env=env)
        assert finished.code == 0, finished.stderr
        told.append(finished.stdout.decode().splitlines()[-2:])
    first, second = told
    assert first[0].startswith(KEPT) and second[0].startswith(READ)
    assert first[1] == second[1]


@two_ranks
def test_a_second_start_reads_and_the_plan_says_so(ranks, tmp_path):
    found = []
    for text in ("captured and cut in", READ):
        with keeping_in(tmp_path / "kept"):
            step = AutoParallel(Small()).dataset_strategy("full_batch")
            found.append(step(waves(4, 6, WIDTH)).detach())
        line = next(line for line in step.plan.explain().splitlines() if line.startswith(text))
        assert step.captures == 1
        assert f"in {step.plan.captured_s:.2f} s" in line
        assert ranks.gather(step.plan.kept)[0] == f"{READ if text == READ else 'kept in '}{tmp_path / 'kept'}"
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def _set_scale(network):
    network.layers[1].scale = 2.0


def _whole_scale(network):
    for layer in network.layers:
        layer.scale = 1


def _replace_method(network):
    def forward(self, x):
        return x - self.down(torch.relu(self.up(x)))

    for layer in network.layers:
        layer.forward = types.MethodType(forward, layer)


def _hook(network):
    network.layers[0].register_forward_hook(lambda _module, _args, result: result * 3)


CHANGES = {
    "an attribute": {"change": _set_scale},
    "an attribute's type": {"change": _whole_scale},
    "a method": {"change": _replace_method},
    "a hook": {"change": _hook},
    "evaluation": {"change": lambda network: network.eval()},
    "a frozen weight": {"change": lambda network: network.layers[0].up.weight.requires_grad_(requires_grad=False)},
    "one layer less": {"change": lambda network: network.layers.pop(1)},
    "a shape": {"batch": (4, 8, WIDTH)},
    "a wanted gradient": {"needs_gradient": True},
    "an argument": {"twice": True},
    "a setting": {"settings": lambda step: step.hsdp(threshold=0)},
    "a dataset strategy": {"settings": lambda step: step.dataset_strategy(((1, 1, 1),))},
    "a strategy": {},
    "a wrapper": {},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the tests of other calls find that of the plain one."""
    return tmp_path_factory.mktemp("captures") / "kept"


@two_ranks
@pytest.mark.parametrize("what", one_fast(*CHANGES))
def test_what_is_another_call_is_captured(ranks, kept, what):
    start(kept)
    given = dict(CHANGES[what])
    if what in ("a strategy", "a wrapper"):
        given["network"] = Network() if what == "a strategy" else GradAccumulation(cut(Network()), 2)
    assert not start(kept, **given)[0].startswith(READ)
    assert start(kept)[0].startswith(READ)  # both are kept


def _source(operator):
    module = types.ModuleType("edited_network")
    text = f"""
import torch
from torch import nn
SIZE = 2
def helper(x):
    return x {operator} SIZE
class Edited(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return helper(self.layer(x)).square().mean()
"""
    sys.modules["edited_network"] = module
    module.__file__ = "/tmp/edited_network.py"
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module.Edited


@two_ranks
def test_an_edited_line_of_a_function_that_is_called_is_seen(ranks, tmp_path):
    said = []
    losses = []
    for operator in ("*", "+", "+", "*"):
        text, (loss, *_) = start(tmp_path / "kept", _source(operator)())
        said.append(text.startswith(READ))
        losses.append(loss)
        torch.testing.assert_close(loss, _source(operator)()(waves(4, 6, WIDTH)).detach())
    assert said == [False, False, True, True]
    assert losses[0] == losses[3] != losses[1] == losses[2]


@two_ranks
def test_other_versions_are_captured(ranks, kept):
    start(kept / "small", Small())
    with mock.patch.object(kept_captures, "_versions", lambda: "of tomorrow"):
        assert not start(kept / "small", Small())[0].startswith(READ)


def copy(folder, to):
    shutil.copytree(folder, to)
    to.chmod(0o700)


def _files(folder):
    return sorted(folder.iterdir())


def _cut_off(folder):
    for path in _files(folder):
        path.write_bytes(path.read_bytes()[:-20])


def _flip(folder):
    for path in _files(folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def _empty(folder):
    for path in _files(folder):
        path.write_bytes(b"")


def _link(folder):
    for path in _files(folder):
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")


def _give_away(folder):
    for path in _files(folder):
        os.chown(path, 12345, 12345)


def _pipe(folder):
    for path in _files(folder):
        path.unlink()
        os.mkfifo(path)


DAMAGES = (_cut_off, _flip, _empty, _link, _give_away, _pipe)


@two_ranks
@pytest.mark.parametrize("damage", one_fast(*DAMAGES))
def test_a_file_that_is_damaged_or_not_the_users_is_not_read(ranks, kept, tmp_path, damage):
    _, numbers = start(kept / "small", Small())
    ranks.first(lambda: (copy(kept / "small", tmp_path / "kept"), damage(tmp_path / "kept")))
    said, again = start(tmp_path / "kept", Small())
    assert not said.startswith(READ)
    torch.testing.assert_close(again, numbers, rtol=0, atol=0)
    assert start(tmp_path / "kept", Small())[0].startswith(READ)


def _of_another(folder):
    os.chown(folder, 12345, 12345)


def _open_to_all(folder):
    folder.chmod(0o777)


def _behind_a_link(folder):
    folder.rename(folder.parent / "real")
    folder.symlink_to(folder.parent / "real")


def _file_instead(folder):
    for path in _files(folder):
        path.unlink()
    folder.rmdir()
    folder.write_text("")


@two_ranks
@pytest.mark.parametrize("change", one_fast(_of_another, _open_to_all, _behind_a_link, _file_instead))
def test_a_folder_that_is_not_the_users_alone_is_not_used(ranks, kept, tmp_path, change):
    start(kept / "small", Small())
    ranks.first(lambda: (copy(kept / "small", tmp_path / "kept"), change(tmp_path / "kept")))
    said = ranks.gather(start(tmp_path / "kept", Small())[0])
    assert said[0].startswith("not kept: ")
    assert not any(text.startswith(READ) for text in said)


def test_the_folder_is_that_of_the_users_caches_another_or_none(tmp_path):
    for word in ("off", "OFF", "0", "", "share"):
        with keeping_in(word):
            assert kept_captures.find_folder() is None
    with keeping_in(tmp_path):
        assert kept_captures.find_folder() == tmp_path
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path)}), keeping_in("on"):
        assert kept_captures.find_folder() == tmp_path / "msrun" / "captures"


@two_ranks
def test_captures_are_kept_where_that_is_on_and_there_is_a_place(ranks, tmp_path):
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        assert start("off", Small())[0] == ""
        assert not (tmp_path / "cache").exists()
        start("on", Small())
        assert start("on", Small())[0] == f"{READ}{tmp_path / 'cache' / 'msrun' / 'captures'}"
    found = (tmp_path / "cache" / "msrun" / "captures").stat()
    assert found.st_mode & 0o777 == 0o700
    with mock.patch.object(Path, "expanduser", side_effect=RuntimeError("no home")):
        said = ranks.gather(start("on", Small())[0])
    assert said[0] == "not kept: RuntimeError: no home"


@two_ranks
def test_the_oldest_go_when_there_are_too_many(ranks, tmp_path):
    start(tmp_path / "kept", Small())
    with mock.patch.object(kept_captures, "_MOST_BYTES", 1.5 * _files(tmp_path / "kept")[0].stat().st_size):
        if ranks.rank == 0:  # what else is in a folder of the user's choice, and older than all
            (tmp_path / "kept" / "thesis.tex").write_bytes(bytes(1 << 20))
            os.utime(tmp_path / "kept" / "thesis.tex", (0, 0))
        ranks.gather(None)
        start(tmp_path / "kept", Small(), batch=(4, 8, WIDTH))
        ranks.gather(None)
        assert [path.suffix for path in _files(tmp_path / "kept")] == [".capture", ".tex"]
    assert start(tmp_path / "kept", Small(), batch=(4, 8, WIDTH))[0].startswith(READ)


class Held:
    """Nothing tells one from another in a later process."""

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.held = Held()
        self.of = {self.held: 2.0}

    def forward(self, x):
        return self.layer(x).mean() * self.of[self.held]


@two_ranks
def test_what_is_of_one_process_alone_is_not_kept_and_says_so(ranks, tmp_path):
    for _ in range(2):
        said = ranks.gather(start(tmp_path / "kept", Keyed())[0])
        assert said[0].startswith("not kept: ")
        assert not said[1].startswith(READ)


@slow_two_ranks
def test_all_sizes_of_a_second_start_are_read(ranks, tmp_path):
    counts = []
    for _ in range(2):
        network, right = Small(), Small()
        with keeping_in(tmp_path / "kept"):
            step = AutoParallel(network).dataset_strategy("full_batch")
            said = []
            for tokens in (4, 6, 8, 4):
                x = waves(4, tokens, WIDTH)
                torch.testing.assert_close(step(x), right(x))
                said.append(step.plan.kept.startswith(READ))
        counts.append((said, step.captures))
    assert counts == [([False] * 4, counts[0][1]), ([True] * 4, counts[0][1])]


@two_ranks
def test_rank_0_of_crowded_hosts_captures_for_the_others(ranks, tmp_path):
    with mock.patch.object(os, "sched_getaffinity", lambda _: {0}):
        told = [start(folder, Small()) for folder in ("off", "", tmp_path / "kept")]
        own = ("", "", f"{KEPT} {tmp_path / 'kept'}") if ranks.rank == 0 else ("", f"{READ}rank 0", f"{READ}rank 0")
        assert tuple(said for said, _ in told) == own
        for _, numbers in told:
            torch.testing.assert_close(numbers, told[0][1], rtol=0, atol=0)
        assert start("", Keyed())[0] == ""
    assert start("share", Small())[0] == ("", f"{READ}rank 0")[ranks.rank]
    with mock.patch.object(kept_captures, "hash_of", side_effect=kept_captures.UnportableError("it")):
        assert start("share", Small())[0] == ""  # nobody asked for it to be kept


@slow_two_ranks
def test_what_one_rank_cannot_read_none_reads(ranks, tmp_path):
    own = tmp_path / f"kept {ranks.rank}"
    start(own, Small())
    said = ranks.gather(start(own, Small())[0])  # rank 1 writes none
    assert said == [f"{KEPT} {tmp_path / 'kept 0'}", ""]


@pytest.mark.slow
@two_ranks
def test_a_pipeline_is_captured_each_time_and_says_so(ranks, tmp_path):
    said, _ = start(tmp_path / "kept", Pipeline(Small(), 2), settings=lambda step: step.pipeline(2))
    assert said == "not kept: the division of a pipeline is of this process alone"
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").iterdir())
