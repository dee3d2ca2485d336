"""torch's own habits on cut parameters: the numbers of one process, or one line that says what to use instead."""

import copy
import gc
import io
import itertools
import operator
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cut_networks import (
    Net,
    assert_close,
    assert_state,
    backward,
    batch,
    columns,
    fsdp2,
    hsdp,
    replicas,
    stages,
    train,
    whole,
    whole_batch,
)
from local_parts import local
from on_ranks import on_ranks
from torch import Tensor, nn

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import (
    AutoParallel,
    GradAccumulation,
    WithLoss,
    clip_grad_norm_,
    get_rank,
    load_checkpoint,
    no_init_parameters,
    save_checkpoint,
    whole_parameters,
)

on_two = on_ranks(2)
slow_on_two = on_ranks(2, slow=True)


class Tied(nn.Module):
    """The weight of the first layer is that of the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.middle, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x):
        return self.b(self.middle(self.a(x).tanh()))


def pair(build=hsdp, make=Net):
    """Return the AutoParallel of a network, that network, and the same one for this process alone."""
    network, right = make(), make()
    return build(network), network, right


def refused(call, *words, kind=ParallelError):
    with pytest.raises(kind) as error:
        call()
    assert "\n" not in str(error.value)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


# -- norms ----------------------------------------------------------------------------------------------------------


def five():
    """Fives stay whole under FSDP2."""
    return Net(hidden=5)


OTHER_LAYOUTS = [(columns, Net), (stages, Net), (stages, Tied), (fsdp2, five)]


@on_two
@pytest.mark.parametrize(
    ("build", "make"), [(hsdp, Net), *(pytest.param(*row, marks=pytest.mark.slow) for row in OTHER_LAYOUTS)]
)
def test_torchs_clipping_and_ours_are_global(build, make):
    step, _, right = pair(build, make)
    backward(step, right)
    ways = itertools.product((2.0, 1.0, 3.0, float("inf")), (None, False))
    for halvings, (norm_type, foreach) in enumerate(ways):
        expected = nn.utils.clip_grad_norm_(right.parameters(), limit := 0.05 / 8**halvings, norm_type, foreach=foreach)
        assert_close(clip_grad_norm_(step, 1e9, norm_type), expected)
        assert_close(whole(nn.utils.clip_grad_norm_(step.parameters(), limit, norm_type, foreach=foreach)), expected)
        for one, other in zip(step.parameters(), right.parameters(), strict=True):
            if build is not stages:
                assert_close(whole(one.grad), other.grad)
            elif one.grad is not None and local(one.grad).numel():
                assert_close(local(one.grad), other.grad)


# -- parts of unequal size --------------------------------------------------------------------------------------------


@on_ranks(3, slow=True)
def test_rows_that_do_not_divide_are_cut_in_unequal_parts_and_train_as_one_process(tmp_path):
    class Odd(nn.Module):
        """Of 7, 4 and 2 rows on 3 ranks: 3 + 3 + 1, 2 + 2 + 0, and whole."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(8, 7), nn.Linear(7, 4), nn.Linear(4, 2)
            self.double()

        def forward(self, x):
            return self.c(self.b(self.a(x).tanh()).tanh())

    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, width, generator=generator, dtype=torch.float64) for width in (8, 2))
    mine = slice(4 * get_rank(), 4 * get_rank() + 4)
    sizes = {7: (3, 3, 1), 4: (2, 2, 0), 2: (2, 2, 2)}
    for number, (mode, level) in enumerate(itertools.product(("semi_auto", "data_parallel"), ("level1", "level3"))):
        network, right = Odd(), Odd()
        call = WithLoss(network, F.mse_loss)
        if mode == "semi_auto" and level == "level3":  # gradients are sent after every micro batch
            call = GradAccumulation(call, 2)
        step = AutoParallel(call, mode).hsdp(threshold=0, optimizer_level=level)
        ours, theirs = (torch.optim.AdamW(net.parameters(), 0.01) for net in (step, right))
        for _ in range(3):
            step(x[mine], y[mine]).backward()
            F.mse_loss(right(x), y).backward()
            expected = nn.utils.clip_grad_norm_(right.parameters(), 0.3)
            assert_close(clip_grad_norm_(step, 0.3), expected)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        for value in step.parameters():
            assert local(value).shape[0] == sizes[value.shape[0]][get_rank()]
        assert_state(step.state_dict(), right.state_dict())
        path = tmp_path / str(number)
        save_checkpoint(step, path, ours)
        again = AutoParallel(WithLoss(Odd(), F.mse_loss), "semi_auto").hsdp(threshold=0)
        other = torch.optim.AdamW(again.parameters(), 0.01)
        again(x[mine], y[mine]).backward()
        again.zero_grad()
        load_checkpoint(path, again, optimizer=other)
        assert_state(again.state_dict(), right.state_dict())
        for state in (found.state_dict()["state"] for found in (other, ours)):
            for value, expected in zip(state.values(), theirs.state_dict()["state"].values(), strict=True):
                assert_close(whole(value["exp_avg"]), expected["exp_avg"])


# -- optimizers -----------------------------------------------------------------------------------------------------


@slow_on_two
def test_step_that_fails_leaves_the_checks_on():
    step, network, right = pair()
    backward(step, right)
    optimizer = torch.optim.SGD([{"params": list(step.parameters())}], 0.1)
    optimizer.param_groups[0]["lr"] = "fast"
    for _ in range(2):
        with pytest.raises(TypeError):
            optimizer.step()
        refused(lambda: network.a.weight.data_ptr(), "a.weight")


@slow_on_two
def test_state_of_an_optimizer_of_one_process_is_cut_and_own_state_goes_round():
    step, _, right = pair()
    theirs = torch.optim.Adam(right.parameters(), 0.01)
    ours = torch.optim.Adam(step.parameters(), 0.01)
    backward(step, right)
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step.load_state_dict(right.state_dict())
    step.zero_grad()
    right.zero_grad()
    train(step, right, ours, theirs)
    refused(lambda: torch.save(ours.state_dict(), io.BytesIO()), "(8, 8) of (16, 8)", "save_checkpoint")
    again = torch.optim.Adam(step.parameters(), 0.01)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(step, right, again, theirs)


@slow_on_two
def test_step_in_backward_is_refused_where_all_gradients_are_needed_at_once():
    sgd = torch.optim.SGD
    for build, word in (
        (lambda n: stages(n), "pipeline"),
        (lambda n: hsdp(n).mixed_precision("float16", loss_scale=8.0), "loss scale"),
        (lambda n: AutoParallel(WithLoss(n, F.mse_loss), "data_parallel"), "captured graph"),
        (lambda n: AutoParallel(lambda x: n(x).sum()), "step function"),
    ):
        network = Net()
        step = build(network)
        optimizer = sgd(network.parameters(), 0.1)
        refused(lambda step=step, optimizer=optimizer: step.step_in_backward(optimizer), word, kind=StrategyError)
    network = Net()
    step = hsdp(network)
    for optimizer in (torch.optim.LBFGS(network.parameters()), network):
        refused(lambda optimizer=optimizer: step.step_in_backward(optimizer), "step_in_backward", kind=StrategyError)
    step.step_in_backward(sgd(network.parameters(), 0.1))
    refused(lambda: clip_grad_norm_(step, 1.0), "clip_grad_norm_", "step_in_backward", kind=StrategyError)
    refused(lambda: step.no_sync().__enter__(), "no_sync()", "step_in_backward", kind=StrategyError)
    step = AutoParallel(GradAccumulation(WithLoss(network, F.mse_loss), 2)).dataset_strategy("full_batch")
    step.step_in_backward(sgd(network.parameters(), 0.1))
    refused(lambda: step(*batch()), "2 micro batches", kind=StrategyError)


# -- state dicts, copies, checkpoints ---------------------------------------------------------------------------------


@slow_on_two
def test_state_dict_gives_wholes_and_takes_wholes_in_every_layout():
    for build in (hsdp, columns, stages):
        step, network, right = pair(build)
        backward(step, right)
        assert {type(value) for value in step.state_dict().values()} == {Tensor}
        assert_state(step.state_dict(), right.state_dict())
        other = {name: value + 1 for name, value in right.state_dict().items()}
        for target in (step, network):
            target.load_state_dict(other)
            assert_state(step.state_dict(), other)
            target.load_state_dict(right.state_dict())
            assert_state(step.state_dict(), right.state_dict())
        alone = Net()
        alone.load_state_dict(step.state_dict())
        wrong = {name: value[:2] for name, value in right.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"of \(16, 8\)(.|\n)*\(2, 8\), give the whole"):
            network.load_state_dict(wrong)


@slow_on_two
def test_parts_stay_in_this_process_and_say_why():
    step, network, right = pair()
    backward(step, right)
    best = copy.deepcopy(network.state_dict())
    for save in (network.state_dict, lambda: network, lambda: step):
        refused(lambda save=save: torch.save(save(), io.BytesIO()), "a.weight", "(8, 8) of (16, 8)", "state_dict()")
    step.load_state_dict({name: value * 0 for name, value in right.state_dict().items()})
    network.load_state_dict(best)
    assert_state(step.state_dict(), right.state_dict())


@slow_on_two
def test_a_network_called_outside_its_step_is_whole_and_trains_on_equal_rows_alone(ranks):
    step, network, right = pair()
    x, _ = batch()
    backward(step, right)
    for each in (network, right):
        each.zero_grad()
        each(x).square().mean().backward()
    torch.testing.assert_close(network(x), right(x))
    assert_state(
        {name: parameter.grad.full_tensor() for name, parameter in network.named_parameters()},
        {name: parameter.grad for name, parameter in right.named_parameters()},
    )
    own = network(ranks.part(x)).square().mean()
    refused(own.backward, "linear", "another one on each rank", "give every rank the same rows")


READS = [
    lambda w: w.sum(),
    lambda w: w.mean(),
    lambda w: w.max(),
    lambda w: w.min(dim=1).values,
    lambda w: w.norm(dim=1),
    lambda w: w.flatten(1).norm(dim=1),
    lambda w: w.norm(p=0),
    lambda w: torch.linalg.norm(w, 2),
    lambda w: w.std(),
    lambda w: (w**2).sum(),
    lambda w: (w > 0).sum(),
    lambda w: torch.count_nonzero(w),
    lambda w: w.argmax(),
    lambda w: w.view(-1),
    lambda w: w[3],
    lambda w: w[w > 0],
    lambda w: w[:, 1:3].t().contiguous(),
    lambda w: torch.tensor(w.tolist()),
    lambda w: torch.tensor(w, dtype=torch.float32),
    lambda w: torch.as_tensor(w, dtype=torch.float32).sum(),
    lambda w: torch.asarray(obj=w, dtype=torch.float32)[2],
    lambda w: torch.zeros(1).new_tensor(w),
    lambda w: torch.tensor(w[3]),
    lambda w: torch.from_numpy(w.numpy().copy()),
    lambda w: torch.stack([w, w]),
    lambda w: torch.stack(list(w)),
    lambda w: torch.linalg.svdvals(w),
    lambda w: torch.vmap(torch.sum)(w),
    lambda w: w + torch.ones(2, 16, 8).double(),
    lambda w: torch.allclose(w, w.clone()),
    lambda w: torch.equal(w, w.clone()),
    lambda w: torch.histc(w, 5, -1, 1),
    lambda w: w.numel() * 1000 + w.shape.numel(),
]


@slow_on_two
def test_what_is_read_of_parts_is_that_of_the_whole():
    for build in (hsdp, columns, fsdp2):
        step, network, right = pair(build)
        backward(step, right)
        weight, other = network.a.weight, right.a.weight
        for number, read in enumerate(READS):
            for mine, theirs in ((weight.detach(), other.detach()), (weight.grad, other.grad)):
                found, expected = read(mine), read(theirs)
                if isinstance(expected, Tensor):
                    found = found.clone() if number else found
                    torch.testing.assert_close(torch.as_tensor(found.tolist()), torch.as_tensor(expected.tolist()))
                else:
                    assert found == expected, number
        assert_close((weight + network.b.weight.T).sum(), (other + right.b.weight.T).sum())
        vector = nn.utils.parameters_to_vector(network.parameters())
        assert_close(vector, nn.utils.parameters_to_vector(right.parameters()))
        nn.utils.vector_to_parameters(vector * 2, network.parameters())
        nn.utils.vector_to_parameters(vector.detach().clone() * 2, right.parameters())
        assert_state(step.state_dict(), right.state_dict())


@slow_on_two
def test_rows_and_gradients_are_written_like_those_of_one_process():
    for build in (hsdp, columns, fsdp2):
        step, network, right = pair(build)
        backward(step, right)
        for net in (network, right):
            row = net.a.weight.data[2]
            with torch.no_grad():
                net.a.weight.mul_(3)
                row += 1
                net.a.weight.grad.add_(1)
        assert_close(row.clone(), right.a.weight.detach()[2])
        assert_close(network.a.weight.grad, right.a.weight.grad)
        assert_state(step.state_dict(), right.state_dict())
        torch.manual_seed(get_rank())  # where generators differ, all parts are of rank 0's
        nn.init.normal_(network.a.weight)
        torch.manual_seed(0)
        assert_close(network.a.weight, nn.init.normal_(right.a.weight).detach())
        refused(network.a.weight[3].zero_, "zero_", "requires a gradient")


# -- whole parameters -----------------------------------------------------------------------------------------------


@slow_on_two
def test_whole_parameters_are_read_and_written_and_cut_again_in_every_mode():
    for build in (hsdp, columns, stages, fsdp2, replicas):
        step, network, right = pair(build)
        for first in (True, False):  # also before the first call
            if not first:
                x, y = batch()
                step(x, y).backward()
                F.mse_loss(right(x), y).backward()
            with whole_parameters(step), torch.no_grad():
                for net in (network, right):
                    torch.manual_seed(4)
                    nn.init.orthogonal_(net.a.weight)
                    net.a.weight[3] = 2
                    net.b.weight.data.numpy()[:, 1] = 0.5
                    net.b.weight.div_(torch.linalg.matrix_norm(net.b.weight, 2))
                    net.norm.bias.add_(1)
                    net.seen[0] = 5
                    net.b.bias.data.copy_(torch.linspace(0, 1, 8).double())
                assert_close(network(batch(3)[0]), right(batch(3)[0]))
                alone = copy.deepcopy(network.a) if build is not fsdp2 else right.a
                refused(lambda step=step: step(*batch()), "inside whole_parameters()")
            assert_close(alone.weight, right.a.weight)
            assert_state(step.state_dict(), right.state_dict())
        for mine, theirs in zip(network.parameters(), right.parameters(), strict=True):
            if build is not stages and mine.grad is not None:  # gradients are there again
                assert_close(whole(mine.grad), theirs.grad)


@slow_on_two
def test_whole_parameters_are_those_that_rank_0_wrote_and_other_values_are_refused():
    for build in (hsdp, stages, fsdp2, replicas):
        step, network, right = pair(build)
        step(*batch()).backward()
        with whole_parameters(network), torch.no_grad():
            if get_rank() == 0:
                network.a.weight.mul_(2)
        right.a.weight.data.mul_(2)
        assert_state(step.state_dict(), right.state_dict())

        def differ(network=network):
            with whole_parameters(network), torch.no_grad():
                network.a.weight.fill_(get_rank())

        refused(differ, "rank 1", "a.weight", "same on every rank")
        if build is not replicas:
            assert_state(step.state_dict(), right.state_dict())


@on_two
@pytest.mark.parametrize("level", ["level1", pytest.param("level3", marks=pytest.mark.slow)])
def test_parameters_under_fsdp2_stay_the_objects_that_they_are_with_their_gradients(level):
    """What optimizers, hooks and the user held before the first call is trained; gradients of all kinds add up."""
    network, right = Net(), Net()
    step = AutoParallel(WithLoss(network, F.mse_loss), "data_parallel").hsdp(threshold=0, optimizer_level=level)
    own, theirs, heard = list(network.parameters()), list(right.parameters()), []
    optimizers = [torch.optim.AdamW(each, 0.01) for each in (own, theirs)]
    own[0].register_post_accumulate_grad_hook(lambda parameter: heard.append(parameter is own[0]))
    for seed in range(6):
        x, y = batch(seed)
        if seed == 3:
            own[1].requires_grad_(requires_grad=False)
            theirs[1].requires_grad_(requires_grad=False)
        losses = step(x, y), F.mse_loss(right(x), y)
        assert all(map(operator.is_, network.parameters(), own))
        for loss, each in zip(losses, (own, theirs), strict=True):
            (loss + (each[0] ** 2).sum() if seed % 2 else loss).backward()
        assert heard and all(heard)
        for mine, expected in zip(own, theirs, strict=True):
            assert mine.grad is mine.grad
            assert_close(*(value.grad if value.grad is None else whole(value.grad) for value in (mine, expected)))
        if seed % 3:  # else they add up
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=seed > 3)
        for each in (own, theirs):
            each[2].data = each[2].data + 1
            each[4].grad = None if seed == 2 else (each[4] * 2).detach()
    assert_state(step.state_dict(), right.state_dict())
    refused(lambda: setattr(own[2], "data", own[2].detach().float()), "stays torch.float64")
    assert type(copy.deepcopy(own[0]).grad) is type(None)


# -- hooks, deferred values -------------------------------------------------------------------------------------------


@slow_on_two
@pytest.mark.parametrize("build", [hsdp, whole_batch])
def test_state_made_before_a_deferred_network_had_values_is_refused(build):
    with no_init_parameters():
        network = Net()
    right, step = Net(), build(network)
    early = torch.optim.Adagrad(step.parameters(), 0.01)
    train(step, right, torch.optim.Adam(step.parameters()), torch.optim.Adam(right.parameters()))
    backward(step, right)
    refused(early.step, "Adagrad", "sum", "a.weight" if build is hsdp else "", "first call", kind=StrategyError)


# -- captures -----------------------------------------------------------------------------------------------------


@slow_on_two
def test_captures_beyond_the_limit_are_let_go_and_come_back_when_they_are_needed():
    network, right = Net(), Net()
    step = hsdp(network).keep_captures(2)
    made = []
    for rows in (1, 2, 3, 1, 1, 3):
        x, y = (value[:rows] for value in batch())
        loss = step(x, y)
        loss.backward()
        assert_close(loss.detach(), F.mse_loss(right(x), y).detach())
        made.append(weakref.ref(step.engine.calls[0].compiled))
    del loss
    gc.collect()
    assert [found() is not None for found in made] == [False, False, True, True, True, True]
    for count in (0, True, 1.5):
        refused(lambda count=count: hsdp(Net()).keep_captures(count), "keep_captures", "above 0", kind=StrategyError)


# -- as a module ------------------------------------------------------------------------------------------------------


@slow_on_two
def test_module_methods_after_the_first_call():
    step, network, right = pair()
    backward(step, right)
    refused(step.half, "before", kind=StrategyError)
    step.to("cpu").to(torch.float64)
    step.requires_grad_(requires_grad=False).requires_grad_()
    assert [name for name, _ in step.named_parameters()] == [name for name, _ in right.named_parameters()]
    step.eval()
    assert not network.training
    assert not step.training
    outer = nn.ModuleDict({"inner": step, "head": nn.Linear(2, 2)})
    assert_state({n[6:]: v for n, v in outer.state_dict().items() if n.startswith("inner.")}, right.state_dict())
    outer.load_state_dict({n: v * 0 for n, v in outer.state_dict().items()})
    assert all(not value.any() for value in step.state_dict().values())
