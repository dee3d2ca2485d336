"""Optimizers with MindSpore's arguments, of a table; see `msrun.runtime.optim`.

Where they have a weight decay and no groups, parameters whose name has "beta" or "gamma" do not decay, as in MindSpore.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError, near_miss
from msrun.mindspore.nn.schedules import LearningRateSchedule
from msrun.mindspore.ops.higher_order import HyperMap
from msrun.mindspore.parallel import check_reduced
from msrun.mindspore.tensor import ParameterTuple, name_of
from msrun.runtime import optim

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
        flat = [parameter for group in self.param_groups for parameter in group["params"]]
        places = sorted(range(len(flat)), key=self._order.__getitem__)
        return ParameterTuple(flat[place] for place in places)

    @property
    def learning_rate(self) -> Tensor:
        """The rate of the first group."""
        return torch.tensor(float(self.param_groups[0]["lr"]))

    @property
    def weight_decay(self) -> Any:
        """The decay, or with groups one per parameter."""
        return self._each("weight_decay") if self.is_group else float(self._decay)

    @property
    def global_step(self) -> Tensor:
        """The steps done."""
        return torch.tensor([self._steps], dtype=torch.int32)

    @property
    def decay_flags(self) -> tuple[bool, ...]:
        """Whether each parameter decays."""
        if self.is_group:
            return tuple(decay > 0 for decay in self._each("weight_decay"))
        return tuple(map(_decays, self.parameters))

    @property
    def optim_filter(self) -> tuple[bool, ...]:
        """Whether each parameter is stepped here: all are."""
        return (True,) * len(self._order)

    @property
    def param_length(self) -> int:
        """The number of parameters."""
        return len(self._order)

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
        """Return `weight_decay`."""
        return self.weight_decay

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
        self._rates: list[_Rates | None] = []
        ordered: list[Any] | None = None
        groups: list[dict[str, Any]] = []
        for entry in given if self.is_group else _by_decay(given, weight_decay):
            unknown = [word for word in entry if word not in _GROUP_WORDS]
            if unknown:
                near = near_miss(unknown[0], _GROUP_WORDS)
                raise UsageError(f"{name}: group with {unknown[0]!r}{near}; known are {', '.join(_GROUP_WORDS)}")
            if "order_params" in entry:
                ordered = list(entry["order_params"])
            if "params" not in entry:
                continue
            group: dict[str, Any] = {"params": list(entry["params"])}
            if "weight_decay" in entry:
                group["weight_decay"] = float(entry["weight_decay"])
            rate = entry.get("lr", learning_rate)
            rates = None if isinstance(rate, int | float) else _Rates(rate)
            self._rates.append(rates)
            group["lr"] = float(rate) if rates is None else rates(0)
            groups.append(group)
        self.is_group_lr = self.is_group and any("lr" in entry for entry in given)
        self.dynamic_lr = any(rate is not None and rate.changes for rate in self._rates)
        flat = [id(parameter) for group in groups for parameter in group["params"]]
        order = [id(parameter) for parameter in ordered or (() if self.is_group else given)] or flat
        if sorted(order) != sorted(flat):
            raise UsageError(f"{name}: order_params must be the parameters of all groups, each once")
        places = {one: place for place, one in enumerate(order)}
        self._order = [places[one] for one in flat]
        return groups, groups[0]["lr"]

    def _follow_plan(self) -> None:
        if any(rate is not None for rate in self._rates):
            self.register_step_pre_hook(lambda *_: self._before_step())

    def _before_step(self) -> None:
        for group, rate in zip(self.param_groups, self._rates, strict=False):
            if rate is not None:
                group["lr"] = rate(self._steps)
        self._steps += 1

    def _each(self, word: str) -> tuple[float, ...]:
        flat = [float(group[word]) for group in self.param_groups for _ in group["params"]]
        return tuple(flat[place] for place in sorted(range(len(flat)), key=self._order.__getitem__))


class _Rates:
    """The rate of each step: of a list the last one stays."""

    def __init__(self, rates: Any) -> None:
        is_schedule = isinstance(rates, nn.Module)
        self._schedule = rates if is_schedule else None
        values = () if is_schedule else torch.as_tensor(rates if isinstance(rates, Tensor) else list(_numbers(rates)))
        self._values = [] if is_schedule else [float(one) for one in values.reshape(-1)]  # type: ignore[union-attr]
        self.changes = is_schedule or len(self._values) > 1

    def __call__(self, step: int) -> float:
        if self._schedule is None:
            return self._values[min(step, len(self._values) - 1)]
        if isinstance(self._schedule, LearningRateSchedule):
            return self._schedule.rate(step)
        return float(self._schedule(torch.tensor(step, dtype=torch.float32)))


def _numbers(rates: Any) -> Iterable[float]:
    try:
        return [float(one) for one in rates] if isinstance(rates, Iterable) else [float(rates)]
    except (TypeError, ValueError):
        raise UsageError(f"learning_rate={rates!r}: a number, one per step, or a LearningRateSchedule") from None


def _decays(parameter: Tensor) -> bool:
    return "beta" not in name_of(parameter) and "gamma" not in name_of(parameter)


def _by_decay(parameters: list[Tensor], weight_decay: Any) -> list[dict[str, Any]]:
    spared = [one for one in parameters if not _decays(one)] if weight_decay else []
    if not spared:
        return [{"params": parameters}]
    decaying = [one for one in parameters if _decays(one)]
    rest: list[dict[str, Any]] = [{"params": decaying}] if decaying else []
    return [*rest, {"params": spared, "weight_decay": 0.0}]


class _RMSProp(optim.Optimizer):
    """s = decay s + (1 - decay) g g, v = momentum v + lr g / sqrt(s + epsilon), w = w - v; s begins at 1.

    Args:
        centered: the square of the mean gradient is taken from s.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once with the gradients in `.grad`."""
        loss = self.run_closure(closure)
        for group in self.param_groups:
            decay, momentum = group["decay"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean_square"] = torch.ones_like(parameter)
                    state["moment"], state["mean"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                gradient = parameter.grad + group["weight_decay"] * parameter
                square = state["mean_square"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
                if group["centered"]:
                    mean = state["mean"].mul_(decay).add_(gradient, alpha=1 - decay)
                    square = square - mean * mean
                root = (square + group["epsilon"]).sqrt()
                state["moment"].mul_(momentum).addcdiv_(gradient, root, value=group["lr"])
                parameter.sub_(state["moment"])
        return loss


def _plain_adam(is_other: bool, **settings: Any) -> dict[str, Any]:
    if is_other:
        raise UsageError("Adam(use_nesterov=True) or (use_lazy=True): use LazyAdam, which has both")
    return settings


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., dict[str, Any]], str]] = {
    "SGD": (optim.SGD, lambda params, learning_rate=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
        loss_scale=1.0: {"momentum": momentum, "dampening": dampening, "nesterov": nesterov},
        "w = w - lr v, v = momentum v + g."),
    "Momentum": (optim.Momentum, lambda params, learning_rate, momentum, weight_decay=0.0, loss_scale=1.0,
        use_nesterov=False: {"momentum": momentum, "nesterov": use_nesterov}, "v = momentum v + g, w = w - lr v."),
    "Adam": (optim.Adam, lambda params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, use_locking=False,
        use_nesterov=False, weight_decay=0.0, loss_scale=1.0, use_amsgrad=False, use_lazy=False, use_offload=False:
            _plain_adam(use_nesterov or use_lazy, betas=(beta1, beta2), eps=eps, amsgrad=use_amsgrad, use_eps_hat=True,
                target="cpu" if use_offload else "device"),
        "Adam with bias correction, and epsilon where MindSpore has it; `optim.Adam` has both formulas."),
    "AdamWeightDecay": (optim.AdamWeightDecay, lambda params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-6,
        weight_decay=0.0: {"betas": (beta1, beta2), "eps": eps}, "Adam without bias correction, with decoupled decay."),
    "Lamb": (optim.Lamb, lambda params, learning_rate, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0: {
        "betas": (beta1, beta2), "eps": eps}, "Adam whose step of each parameter is scaled by the parameter's norm."),
    "LazyAdam": (optim.LazyAdam, lambda params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, use_locking=False,
        use_nesterov=False, weight_decay=0.0, loss_scale=1.0: {
            "betas": (beta1, beta2), "eps": eps, "use_locking": use_locking, "use_nesterov": use_nesterov},
        "Adam; of a sparse gradient its rows alone change."),
    "FTRL": (optim.FTRL, lambda params, initial_accum=0.1, learning_rate=1e-3, lr_power=-0.5, l1=0.0, l2=0.0,
        use_locking=False, loss_scale=1.0, weight_decay=0.0: {
            "initial_accum": initial_accum, "lr_power": lr_power, "l1": l1, "l2": l2, "use_locking": use_locking},
        "Follow the regularised leader; of a sparse gradient its rows alone change."),
    "RMSProp": (_RMSProp, lambda params, learning_rate=0.1, decay=0.9, momentum=0.0, epsilon=1e-10, use_locking=False,
        centered=False, loss_scale=1.0, weight_decay=0.0: {
            "decay": decay, "momentum": momentum, "epsilon": epsilon, "centered": centered}, str(_RMSProp.__doc__)),
    "Adagrad": (torch.optim.Adagrad, lambda params, accum=0.1, learning_rate=0.001, update_slots=True, loss_scale=1.0,
        weight_decay=0.0: {"initial_accumulator_value": accum, "eps": 1e-10},
        "Gradients divided by the root of the sum of their squares."),
    "AdaMax": (torch.optim.Adamax, lambda params, learning_rate=0.001, beta1=0.9, beta2=0.999, eps=1e-8,
        weight_decay=0.0, loss_scale=1.0: {"betas": (beta1, beta2), "eps": eps},
        "Adam with the largest gradient in place of the mean square."),
    "Adadelta": (torch.optim.Adadelta, lambda params, learning_rate=1.0, rho=0.9, epsilon=1e-6, loss_scale=1.0,
        weight_decay=0.0: {"rho": rho, "eps": epsilon}, "Gradients scaled by the sizes of the last steps."),
    "Rprop": (torch.optim.Rprop, lambda params, learning_rate=0.1, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0),
        weight_decay=0.0: {"etas": etas, "step_sizes": step_sizes}, "Steps whose sizes follow the gradients' signs."),
    "ASGD": (torch.optim.ASGD, lambda params, learning_rate=0.1, lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0.0: {
        "lambd": lambd, "alpha": alpha, "t0": t0}, "SGD that also keeps the mean of the weights."),
}  # fmt: skip
"""Name -> optimizer of torch or of msrun.runtime, its settings from MindSpore's arguments, and what it computes."""


def _of(
    name: str, base: type[torch.optim.Optimizer], arguments: Callable[..., dict[str, Any]], doc: str
) -> type[Optimizer]:
    signature = inspect.signature(arguments)

    def __init__(self: Any, *args: Any, **words: Any) -> None:  # noqa: N807
        try:
            bound = signature.bind(*args, **words)
        except TypeError as error:
            raise UsageError(f"nn.{name}: {error}") from None
        bound.apply_defaults()
        given = bound.arguments
        self._set_scale(given.get("loss_scale", 1.0))
        settings = arguments(*bound.args, **bound.kwargs)
        if base is not torch.optim.Rprop:
            settings["weight_decay"] = given["weight_decay"]
        groups, rate = self._plan(given["params"], given["learning_rate"], given["weight_decay"])
        settings["learning_rate" if base is optim.Momentum else "lr"] = rate
        base.__init__(self, groups, **settings)
        self._follow_plan()

    body = {"__init__": __init__, "arguments": staticmethod(arguments), "step": base.step, "__doc__": doc}
    return type(name, (Optimizer, base), {**body, "__module__": "msrun.mindspore.nn"})


OPTIMIZER_CLASSES = {name: _of(name, *row) for name, row in OPTIMIZERS.items()}
"""Name -> class."""
