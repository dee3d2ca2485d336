"""Optimizers with MindSpore's arguments, of a table, and the rates that they follow; see `msrun.runtime.optim`.

Rates that change are lists of one per step, or cells of the step; both have the same formulas.

Where they have a weight decay and no groups, parameters whose name has "beta" or "gamma" do not decay, as in MindSpore.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.mindspore.nn.cells import Cell
from msrun.mindspore.ops.higher_order import HyperMap
from msrun.mindspore.ops.table import refuse_unknown, taking
from msrun.mindspore.parallel import check_reduced
from msrun.mindspore.tensor import ParameterTuple, name_of
from msrun.runtime import optim
from msrun.runtime.optim.base import PerParameter


def _cosine(at: float, min_lr: float, max_lr: float, decay: float) -> float:
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * min(at, decay) / decay))


def _exponential(at: float, rate: float, decay_rate: float, decay: float, is_stair: bool) -> float:
    return rate * decay_rate ** (at // decay if is_stair else at / decay)


def _natural(at: float, rate: float, decay_rate: float, decay: float, is_stair: bool) -> float:
    return rate * math.exp(-decay_rate * (at // decay * decay if is_stair else at))


def _inverse(at: float, rate: float, decay_rate: float, decay: float, is_stair: bool) -> float:
    return rate / (1 + decay_rate * (at // decay if is_stair else at / decay))


def _polynomial(at: float, rate: float, end: float, decay: float, power: float, grows: bool) -> float:
    whole = decay * max(math.ceil(at / decay), 1) if grows else decay
    return (rate - end) * (1 - min(at, whole) / whole) ** power + end


def _warm(at: float, rate: float, steps: float) -> float:
    return rate * min(at, steps) / steps


class LearningRateSchedule(Cell):
    """Base: `construct(global_step)` returns the rate of a step."""

    _formula: Callable[..., float]
    _settings: tuple[Any, ...]

    def construct(self, global_step: Any) -> Tensor:
        """Return the rate, or of several steps theirs."""
        steps = torch.as_tensor(global_step)
        rates = [type(self)._formula(float(step), *self._settings) for step in steps.reshape(-1)]
        return torch.tensor(rates).reshape(steps.shape)

    def rate(self, step: int) -> float:
        """Return the rate of a step as a number."""
        return float(self(torch.tensor(step, dtype=torch.float32)))


def _schedules(names: str, formula: Callable[..., float], words: str, doc: str) -> dict[str, Any]:
    """Return a function that lists a rate per step, constant in an epoch, and a cell of the step, of one formula.

    Args:
        words: the cell's arguments; the function has total_step and step_per_epoch too, and epochs in place of steps.
    """
    first = next(word for word in words.split() if word.endswith("_steps"))
    of_epochs = f" {words}".replace(f" {first}", f" total_step step_per_epoch {first}").replace("_steps", "_epoch")
    function, cell = names.split()
    arguments = taking(words, dict, cell)

    def listed(total_step: int, step_per_epoch: int, **settings: Any) -> list[float]:
        return [float(formula(step // step_per_epoch, *settings.values())) for step in range(total_step)]

    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807
        super(LearningRateSchedule, self).__init__()
        given = arguments(*args, **settings)
        vars(self).update(given, _settings=tuple(given.values()))

    rates = taking(of_epochs, listed)
    rates.__name__, rates.__doc__ = function, f"Return rates, one a step, for each epoch one: {doc}"
    body = {"__init__": __init__, "arguments": staticmethod(arguments), "_formula": staticmethod(formula)}
    kind = type(cell, (LearningRateSchedule,), {**body, "__doc__": doc, "__module__": "msrun.mindspore.nn"})
    return {function: rates, cell: kind}


_DECAYING = "learning_rate decay_rate decay_steps is_stair=False"
SCHEDULES = {
    **_schedules("cosine_decay_lr CosineDecayLR", _cosine, "min_lr max_lr decay_steps",
                 "half a cosine from max_lr to min_lr over decay_steps."),
    **_schedules("exponential_decay_lr ExponentialDecayLR", _exponential, _DECAYING,
                 "learning_rate * decay_rate ** (step / decay_steps)."),
    **_schedules("natural_exp_decay_lr NaturalExpDecayLR", _natural, _DECAYING,
                 "learning_rate * e ** (-decay_rate * step)."),
    **_schedules("inverse_decay_lr InverseDecayLR", _inverse, _DECAYING,
                 "learning_rate / (1 + decay_rate * step / decay_steps)."),
    **_schedules("polynomial_decay_lr PolynomialDecayLR", _polynomial,
                 "learning_rate end_learning_rate decay_steps power update_decay_steps=False",
                 "falls to end_learning_rate as (1 - step / decay_steps) ** power."),
    **_schedules("warmup_lr WarmUpLR", _warm, "learning_rate warmup_steps", "grows to learning_rate in equal steps."),
}  # fmt: skip
"""Name -> function or cell."""


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """Return each rate up to its milestone."""
    pieces = zip([0, *milestone[:-1]], milestone, learning_rates, strict=True)
    return [float(rate) for begin, end, rate in pieces for _ in range(begin, end)]


_GROUP_WORDS = ("params", "lr", "weight_decay", "order_params")


class Optimizer(optim.Optimizer):
    """Base of MindSpore's optimizers, and of one's own: a subclass has `construct(gradients)`.

    Args:
        learning_rate: a number, one number per step (a list or a tensor), or a LearningRateSchedule.
        parameters: those that are trained, or groups {"params": ..., "lr": ..., "weight_decay": ...}.

    Raises:
        UsageError: an unknown word of a group, or a `loss_scale` that is no number above 0.
    """

    loss_scale = 1.0
    """What gradients that it is called with are divided by."""

    def __init__(self, learning_rate: Any, parameters: Any, weight_decay: float = 0.0, loss_scale: float = 1.0) -> None:
        self._set_scale(loss_scale)
        groups, rate = self._plan(parameters, learning_rate, weight_decay)
        torch.optim.Optimizer.__init__(self, groups, {"lr": rate, "weight_decay": float(weight_decay)})
        self._follow_plan()

    def __call__(self, gradients: Sequence[Tensor]) -> Any:
        """Step once with one gradient per parameter, in the order of `parameters`.

        Raises:
            StrategyError: under a parallel context, gradients that nobody has reduced over the ranks.
        """
        self._calls += 1
        if self._calls & (self._calls - 1) == 0:  # ever more rarely
            gradients = tuple(gradients)
            check_reduced(self.parameters, gradients)
        if type(self).construct is not Optimizer.construct:
            with torch.no_grad():
                return self.construct(tuple(gradients))
        given = list(self.scale_grad(gradients))
        if len(given) == len(self._order):
            given = [given[place] for place in self._order]
        return super().__call__(given)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once with the gradients in `.grad`."""
        loss = self.run_closure(closure)
        with torch.no_grad():
            self.construct(tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters))
        return loss

    def construct(self, gradients: Sequence[Tensor]) -> Any:
        """Change the parameters; to be written by a subclass."""
        raise NotImplementedError(f"{type(self).__name__}.construct(gradients): write it")

    # -- what a construct reads -------------------------------------------------------------------------------------

    @property
    def parameters(self) -> ParameterTuple:
        """The parameters, in the order in which gradients are given."""
        return ParameterTuple(self._ordered(one for group in self.param_groups for one in group["params"]))

    learning_rate = property(lambda self: torch.tensor(float(self.param_groups[0]["lr"])))
    """The rate of the first group."""
    global_step = property(lambda self: torch.tensor([self._steps], dtype=torch.int32))
    """The steps done."""
    weight_decay = property(lambda self: self.get_weight_decay())
    param_length = property(lambda self: len(self._order))
    """The number of parameters."""
    optim_filter = property(lambda self: (True,) * len(self._order))
    """Whether each parameter is stepped here: all are."""

    @property
    def decay_flags(self) -> tuple[bool, ...]:
        """Whether each parameter decays."""
        if self.is_group:
            return tuple(decay > 0 for decay in self._each("weight_decay"))
        return tuple(map(_decays, self.parameters))

    map_ = hyper_map = HyperMap()
    """`map_(fn, ...)` calls a function of each parameter."""
    map_reverse = HyperMap(reverse=True)
    """The same, the last parameters first."""

    def get_lr(self) -> Any:
        """Return the rate of this step, or with groups of rates one per parameter, and count the step."""
        self._before_step()
        rates = self._each("lr")
        return tuple(map(torch.tensor, rates)) if self.is_group_lr else torch.tensor(rates[0])

    def get_lr_parameter(self, param: Any) -> Any:
        """Return the rate of a parameter, or of each of several."""
        many = not isinstance(param, Tensor)
        rates = {id(p): rate for p, rate in zip(self.parameters, self._each("lr"), strict=True)}
        found = [torch.tensor(rates[id(one)]) for one in (param if many else [param])]
        return found if many else found[0]

    def get_weight_decay(self) -> Any:
        """Return the decay, or with groups one per parameter."""
        return self._each("weight_decay") if self.is_group else float(self._decay)

    def decay_weight(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return gradients with decay * weight added where parameters decay."""
        decays = self._each("weight_decay")
        return tuple(g + d * p if d else g for g, d, p in zip(gradients, decays, self.parameters, strict=True))

    def flatten_gradients(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients."""
        return gradients

    gradients_centralization = flatten_gradients

    def scale_grad(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients divided by `loss_scale`."""
        return gradients if self.loss_scale == 1.0 else tuple(one / self.loss_scale for one in gradients)

    def _set_scale(self, loss_scale: Any) -> None:
        if not isinstance(loss_scale, int | float) or not loss_scale > 0:
            raise UsageError(f"{type(self).__name__}(loss_scale={loss_scale!r}): a number above 0")
        self.loss_scale = float(loss_scale)

    # -- groups and rates -------------------------------------------------------------------------------------------

    def _plan(self, parameters: Any, learning_rate: Any, weight_decay: float) -> tuple[list[dict[str, Any]], float]:
        """Return torch's groups and the first rate, and keep what they do not hold."""
        given: list[Any] = [parameters] if isinstance(parameters, Tensor | dict) else list(parameters)
        name = type(self).__name__
        if not given:
            raise UsageError(f"{name}: no parameters; give net.trainable_params()")
        self.is_group = isinstance(given[0], dict)
        self._decay, self._steps, self._calls = weight_decay, 0, 0
        self._rates: list[tuple[Callable[[int], float], bool]] = []
        ordered: list[Any] | None = None
        groups: list[dict[str, Any]] = []
        for entry in given if self.is_group else _by_decay(given, weight_decay):
            refuse_unknown(f"{name}: group", entry, _GROUP_WORDS, f"; known are {', '.join(_GROUP_WORDS)}")
            if "order_params" in entry:
                ordered = list(entry["order_params"])
            if "params" not in entry:
                continue
            group: dict[str, Any] = {"params": list(entry["params"])}
            if "weight_decay" in entry:
                group["weight_decay"] = float(entry["weight_decay"])
            self._rates.append(_rate_of(entry.get("lr", learning_rate)))
            groups.append({**group, "lr": self._rates[-1][0](0)})
        self.is_group_lr = self.is_group and any("lr" in entry for entry in given)
        self.dynamic_lr = any(changes for _, changes in self._rates)
        flat = [id(parameter) for group in groups for parameter in group["params"]]
        order = [id(parameter) for parameter in ordered or (() if self.is_group else given)] or flat
        if sorted(order) != sorted(flat):
            raise UsageError(f"{name}: order_params must be the parameters of all groups, each once")
        places = {one: place for place, one in enumerate(order)}
        self._order = [places[one] for one in flat]
        return groups, groups[0]["lr"]

    def _follow_plan(self) -> None:
        if self.dynamic_lr:
            self.register_step_pre_hook(lambda *_: self._before_step())

    def _before_step(self) -> None:
        for group, (rate, changes) in zip(self.param_groups, self._rates, strict=False):
            if changes:
                group["lr"] = rate(self._steps)
        self._steps += 1

    def _ordered(self, flat: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(one for _, one in sorted(zip(self._order, flat, strict=False), key=lambda pair: pair[0]))

    def _each(self, word: str) -> tuple[float, ...]:
        return self._ordered(float(group[word]) for group in self.param_groups for _ in group["params"])


def _rate_of(rates: Any) -> tuple[Callable[[int], float], bool]:
    """Return the rate of a step, of a list the last one stays, and whether it changes."""
    if isinstance(rates, nn.Module):
        return lambda step: float(rates(torch.tensor(step, dtype=torch.float32))), True
    try:
        given = rates.reshape(-1) if isinstance(rates, Tensor) else rates if isinstance(rates, Iterable) else [rates]
        values = [float(one) for one in given]
    except (TypeError, ValueError):
        raise UsageError(f"learning_rate={rates!r}: a number, one per step, or a LearningRateSchedule") from None
    return lambda step: values[min(step, len(values) - 1)], len(values) > 1


def _decays(parameter: Tensor) -> bool:
    return "beta" not in name_of(parameter) and "gamma" not in name_of(parameter)


def _by_decay(parameters: list[Tensor], weight_decay: Any) -> list[dict[str, Any]]:
    spared = [one for one in parameters if not _decays(one)] if weight_decay else []
    rest = [one for one in parameters if _decays(one)] if spared else parameters
    return [{"params": rest}] * bool(rest) + [{"params": spared, "weight_decay": 0.0}] * bool(spared)


class _RMSProp(PerParameter):
    """s = decay s + (1 - decay) g g, v = momentum v + lr g / sqrt(s + epsilon), w = w - v; s begins at 1.

    Of a sparse gradient its rows alone change.

    Args:
        centered: the square of the mean gradient is taken from s.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def make_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(parameter)
        return {"mean_square": torch.ones_like(parameter), "moment": zeros, "mean": zeros.clone()}

    def change(self, weight: Tensor, gradient: Tensor, tables: dict[str, Tensor], state: Any, group: Any) -> None:
        square = tables["mean_square"].mul_(group["decay"]).addcmul_(gradient, gradient, value=1 - group["decay"])
        if group["centered"]:
            mean = tables["mean"].mul_(group["decay"]).add_(gradient, alpha=1 - group["decay"])
            square = square - mean * mean
        root = (square + group["epsilon"]).sqrt()
        weight.sub_(tables["moment"].mul_(group["momentum"]).addcdiv_(gradient, root, value=group["lr"]))


_BETAS = "beta1=0.9 beta2=0.999"
_DECAY, _SCALED = "weight_decay=0.0", "loss_scale=1.0"
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], str, str]] = {
    "SGD": (optim.SGD, f"learning_rate=0.1 momentum=0.0 dampening=0.0 {_DECAY} nesterov=False {_SCALED}",
        "w = w - lr v, v = momentum v + g."),
    "Momentum": (optim.Momentum, f"learning_rate momentum {_DECAY} {_SCALED} use_nesterov>nesterov=False",
        "v = momentum v + g, w = w - lr v."),
    "Adam": (optim.Adam, (f"learning_rate=1e-3 {_BETAS} eps=1e-8 use_locking>=False use_nesterov=False {_DECAY} "
        f"{_SCALED} use_amsgrad>amsgrad=False use_lazy=False use_offload=False"),
        "Adam with bias correction, and epsilon where MindSpore has it; `optim.Adam` has both formulas."),
    "AdamWeightDecay": (optim.AdamWeightDecay, f"learning_rate=1e-3 {_BETAS} eps=1e-6 {_DECAY}",
        "Adam without bias correction, with decoupled decay."),
    "Lamb": (optim.Lamb, f"learning_rate {_BETAS} eps=1e-6 {_DECAY}",
        "Adam whose step of each parameter is scaled by the parameter's norm."),
    "LazyAdam": (optim.LazyAdam, (f"learning_rate=1e-3 {_BETAS} eps=1e-8 use_locking=False use_nesterov=False "
        f"{_DECAY} {_SCALED}"), "Adam; of a sparse gradient its rows alone change."),
    "FTRL": (optim.FTRL, ("initial_accum=0.1 learning_rate=1e-3 lr_power=-0.5 l1=0.0 l2=0.0 use_locking=False "
        f"{_SCALED} {_DECAY}"), "Follow the regularised leader; of a sparse gradient its rows alone change."),
    "RMSProp": (_RMSProp, ("learning_rate=0.1 decay=0.9 momentum=0.0 epsilon=1e-10 use_locking>=False centered=False "
        f"{_SCALED} {_DECAY}"), str(_RMSProp.__doc__)),
    "Adagrad": (torch.optim.Adagrad, ("accum>initial_accumulator_value=0.1 learning_rate=0.001 update_slots>=True "
        f"{_SCALED} {_DECAY}"), "Gradients divided by the root of the sum of their squares."),
    "AdaMax": (torch.optim.Adamax, f"learning_rate=0.001 {_BETAS} eps=1e-8 {_DECAY} {_SCALED}",
        "Adam with the largest gradient in place of the mean square."),
    "Adadelta": (torch.optim.Adadelta, f"learning_rate=1.0 rho=0.9 epsilon>eps=1e-6 {_SCALED} {_DECAY}",
        "Gradients scaled by the sizes of the last steps."),
    "Rprop": (torch.optim.Rprop, f"learning_rate=0.1 etas=(0.5,1.2) step_sizes=(1e-6,50.0) {_DECAY}",
        "Steps whose sizes follow the gradients' signs."),
    "ASGD": (torch.optim.ASGD, f"learning_rate=0.1 lambd=1e-4 alpha=0.75 t0=1e6 {_DECAY}",
        "SGD that also keeps the mean of the weights."),
}  # fmt: skip
"""Name -> optimizer of torch or of msrun.runtime, MindSpore's arguments behind `params`, and what it computes."""


def _settled(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as torch's optimizers take them."""
    if "beta1" in settings:
        settings["betas"] = settings.pop("beta1"), settings.pop("beta2")
    if name == "Adam":
        if settings.pop("use_nesterov") | settings.pop("use_lazy"):
            raise UsageError("Adam(use_nesterov=True) or (use_lazy=True): use LazyAdam, which has both")
        settings |= {"use_eps_hat": True, "target": "cpu" if settings.pop("use_offload") else "device"}
    if name == "Adagrad":
        settings["eps"] = 1e-10
    return settings


def _of(name: str, base: type[torch.optim.Optimizer], words: str, doc: str) -> type[Optimizer]:
    arguments = taking(f"params {words}", dict, f"nn.{name}")

    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807
        given = _settled(name, arguments(*args, **settings))
        params, rate, decay = (given.pop(word) for word in ("params", "learning_rate", "weight_decay"))
        self._set_scale(given.pop("loss_scale", 1.0))
        if base is not torch.optim.Rprop:
            given["weight_decay"] = decay
        groups, given["learning_rate" if base is optim.Momentum else "lr"] = self._plan(params, rate, decay)
        base.__init__(self, groups, **given)
        self._follow_plan()

    body = {"__init__": __init__, "arguments": staticmethod(arguments), "step": base.step, "__doc__": doc}
    return type(name, (Optimizer, base), {**body, "__module__": "msrun.mindspore.nn"})


OPTIMIZER_CLASSES = {name: _of(name, *row) for name, row in OPTIMIZERS.items()}
"""Name -> class."""
