"""The tables of operators: one row makes MindSpore's class, its functions and their settings of one computation."""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any, Self

import torch

from msrun import runtime
from msrun.errors import UsageError, near_miss
from msrun.runtime.sharding.named_layout import gathered_layouts

_TARGETS = {"CPU": "cpu", "Ascend": "device", "GPU": "device", "DEVICE": "device"}
"""MindSpore's word -> that of `set_target`."""
_OF_THE_COMPILER = set(
    """
    Fullname comm_reuse cost_estimate enable_cast_before_mirror forward_unique_id fusion gen_prim grad_scale keep_alive
    keep_value_node_input mean_flag no_eliminate op_group opt_shard_group parallel_optimizer_comm_recompute recompute
    recompute_comm_op recompute_id side_effect_hidden side_effect_io side_effect_mem slice_activation unroll_flag
    visited_by_pynative use_nesterov
    """.split()
)
"""Attributes of operators that say nothing about what is computed."""
_noted: set[str] = set()
_log = logging.getLogger("msrun.runtime")


class WordsError(UsageError, TypeError):
    """A call with other words than those that a table has for it."""


def refuse_unknown(owner: str, words: Iterable[str], known: Iterable[str], remedy: str = "") -> None:
    """Raise a WordsError for the first word that is not known."""
    for word in words:
        if word not in known:
            raise WordsError(f"{owner}({word}=...): unknown word{near_miss(word, known)}{remedy}")


def note_once(word: str) -> None:
    """Say once per process that a word of MindSpore's compiler is taken and does nothing here."""
    if word not in _noted:
        _noted.add(word)
        _log.warning(f"{word} is of MindSpore's compiler or memory; it changes nothing here")


class Primitive:
    """One operator: made with its settings, cut with `.shard`, called with tensors.

    Raises:
        UsageError: a setting that the operator does not have, or one too many.
    """

    function: Callable[..., Any]
    settings: tuple[str, ...] = ()
    _gathers_first = False
    """Whether strategies are those of 2D or 3D tensor parallelism."""

    def __init__(self, *values: Any, **settings: Any) -> None:
        kind = type(self)
        self._settings = given = dict(zip(kind.settings, values, strict=False)) | settings
        taken = f"; it takes {', '.join(kind.settings) or 'no settings'}"
        refuse_unknown(kind.__name__, settings, kind.settings, taken)
        if len(values) > len(kind.settings) or len(given) < len(values) + len(settings):
            raise WordsError(f"{kind.__name__}({len(values)} values){taken}")
        self._run = _with(kind.function, given) if given else kind.function

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self._settings.items())})"

    @property
    def name(self) -> str:
        """Return MindSpore's name of the operator."""
        return type(self).__name__

    def shard(self, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None) -> Self:
        """Cut the operator: one tuple per tensor input, see `msrun.runtime.shard`. Returns the operator.

        Raises:
            StrategyError: not tuples of whole numbers above 0.
            UsageError: not the two Layouts that `enable_nd_tp` needs.
        """
        if self._gathers_first:
            transposed = [self._settings.get(name) for name in ("transpose_a", "transpose_b")]
            in_strategy, gathered = gathered_layouts(f"{self.name} with enable_nd_tp", in_strategy, transposed)
            out_strategy = out_strategy or gathered
        self._run = runtime.shard(self._run, in_strategy, out_strategy)
        return self

    def set_device(self, device_target: str) -> Self:
        """Run the operator on the host ("CPU") or the rank's device ("Ascend", "GPU", "DEVICE"): see
        `msrun.runtime.set_target`. Returns the operator.

        Raises:
            UsageError: another word.
        """
        if device_target not in _TARGETS:
            raise UsageError(f"device_target={device_target!r}: must be one of {', '.join(_TARGETS)}")
        self._run = runtime.set_target(self._run, _TARGETS[device_target])
        return self

    def add_prim_attr(self, name: str, value: Any) -> Self:
        """`add_prim_attr("primitive_target", "CPU")` is `set_device("CPU")`; `("enable_nd_tp", True)` of a MatMul or
        BatchMatMul, before `shard`, makes its Layouts those of 2D or 3D tensor parallelism; what the compiler alone
        reads is noted.

        Raises:
            UsageError: another attribute, or another word.
        """
        if name == "primitive_target":
            return self.set_device(value)
        if name == "enable_nd_tp" and self.name in ("MatMul", "BatchMatMul"):
            self._gathers_first = bool(value)
            return self
        if name not in _OF_THE_COMPILER:
            near = near_miss(name, ["primitive_target", *_OF_THE_COMPILER])
            raise UsageError(
                f'add_prim_attr({name!r}){near}: only "primitive_target" means something here; leave it out'
            )
        note_once(f"add_prim_attr({name!r})")
        return self

    def recompute(self, mode: bool = True) -> Self:
        """Return the operator: `recompute` of the cell around it is what saves memory here."""
        note_once(f"{self.name}().recompute()")
        return self


def _with(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        return function(*inputs, **settings)

    run.__name__ = run.__qualname__ = getattr(function, "__name__", "operator")
    return run


def taking(words: str, function: Callable[..., Any], owner: str = "") -> Callable[..., Any]:
    """Return torch's function with MindSpore's arguments. A call with others is a WordsError.

    Args:
        words: of each argument `name`, `name=default`, or `name>torchs_name=default`; `name>` is not passed on. Those
            behind a `*` are given by their names alone.
        owner: name for errors; "" for the function's.
    """
    theirs: dict[str, str] = {}
    parameters: list[Parameter] = []
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    for word in words.split():
        if word == "*":
            kind = Parameter.KEYWORD_ONLY
            continue
        spoken, _, text = word.partition("=")
        name, is_renamed, other = spoken.partition(">")
        theirs[name] = other if is_renamed else name
        default = (getattr(torch, text, None) or ast.literal_eval(text)) if text else Parameter.empty
        parameters.append(Parameter(name, kind, default=default))
    signature = inspect.Signature(parameters)
    defaults = {one.name: one.default for one in parameters if one.default is not Parameter.empty}
    places = [one.name for one in parameters if one.kind is Parameter.POSITIONAL_OR_KEYWORD]

    def run(*args: Any, **settings: Any) -> Any:
        given = dict(zip(places, args, strict=False)) | settings
        whole = {**defaults, **given}
        if (
            len(given) < len(args) + len(settings)
            or [one for one in given if one not in theirs]
            or len(whole) < len(theirs)
        ):
            try:
                signature.bind(*args, **settings)  # it says what is wrong
            except TypeError as error:
                near = near_miss(next((word for word in settings if word not in theirs), ""), theirs)
                raise WordsError(f"{owner or run.__name__}: {error}{near}") from None
        return function(**{other: whole[name] for name, other in theirs.items() if other})

    run.__name__ = run.__qualname__ = getattr(function, "__name__", "operator")
    run.__doc__, vars(run)["__signature__"] = function.__doc__, signature
    return run


def define(
    names: str, function: Callable[..., Any], settings: str = "", words: str = "", *, base: type[Primitive] = Primitive
) -> dict[str, Any]:
    """Return MindSpore's name -> class or function, of one row of a table.

    Args:
        names: of classes (they begin with a capital) and of functions.
        function: computes it; its arguments have the names and defaults of MindSpore's function.
        settings: those of its arguments that the class takes when it is made.
        words: the docstring of the class, if its call alone says too little.
    """
    if getattr(function, "__name__", "") == "<lambda>":
        function.__name__ = function.__qualname__ = next((name for name in names.split() if name[0].islower()), names)
    made: dict[str, Any] = {}
    for name in names.split():
        if name[0].isupper():
            body = {
                "function": staticmethod(function),
                "settings": tuple(settings.split()),
                "__doc__": words or _describe(name, function, settings),
                "__module__": "msrun.mindspore.ops",
            }
            made[name] = type(name, (base,), body)
        else:
            made[name] = function
    return made


def define_all(rows: Iterable[tuple[Any, ...]], base: type[Primitive] = Primitive) -> dict[str, Any]:
    """Return what `define` makes of the rows of a table."""
    return {name: made for row in rows for name, made in define(*row, base=base).items()}


def _describe(name: str, function: Callable[..., Any], settings: str) -> str:
    try:
        inputs = [word for word in inspect.signature(function).parameters if word not in settings.split()]
    except ValueError:  # of torch, in C
        return f"{name}(): `torch.{function.__name__}`."
    return f"`{name}({', '.join(settings.split())})({', '.join(inputs)})`."
