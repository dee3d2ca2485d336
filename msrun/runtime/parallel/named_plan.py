"""A plan by names: which layers are cut how, and what AutoParallel is set to; a mapping, or the same as a YAML file.

    names: {"layers.*.up_proj": colwise, "layers.*.down_proj": rowwise, embed: vocab}
    tensor_parallel: 2
    recompute: ["layers.*"]
    stages: {"layers.[0-3]": 0, "layers.[4-7]": 1}
    mixed_precision: {dtype: bfloat16}
    pipeline: {stages: 2, scheduler: 1f1b}

A mapping without `names` is the names themselves. Every other word is a setter of AutoParallel with its arguments.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from msrun.errors import CaptureError, StrategyError, near_miss
from msrun.runtime.capture.captured_graph import find_target
from msrun.runtime.parallel.settings import FluentSettings, ParallelSettings
from ranktable.bounded_text import TextError, compose_yaml, load_yaml
from ranktable.files import MAX_BYTES, read_text

_ATTRIBUTE = "_msrun_named_plan"
_DEPTH = 20
"""Levels of a file."""
SETTERS = tuple(name for name, found in vars(FluentSettings).items() if callable(found) and not name.startswith("_"))
_OWN_WORDS = ("names", "tensor_parallel", "recompute", "stages", "parallel_mode")
WORDS_OF_PLANS = tuple(dict.fromkeys((*_OWN_WORDS, *SETTERS)))


@dataclass(frozen=True)
class NamedPlan:
    """What a plan says."""

    names: Mapping[str, Any] | None
    """Pattern of modules -> word; None: the plan that the model brings."""
    tensor_parallel: Any = 0
    recompute: tuple[str, ...] = ()
    """Patterns of modules that are recomputed."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Pattern of modules -> stage of the pipeline."""
    parallel_mode: str | None = None
    setters: Mapping[str, Any] = field(default_factory=dict)
    """Setter of AutoParallel -> its arguments: a mapping of words, or the first one."""
    source: str = ""
    """The file; empty for a mapping."""
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @contextmanager
    def at(self, *keys: str) -> Iterator[None]:
        """Let errors inside begin with the line of the file where an entry stands."""
        try:
            yield
        except StrategyError as error:
            if not self.source or error.where:
                raise
            raise StrategyError(error.message, where=f"{self.source}:{self.lines.get(keys, 1)}") from None

    def set(self, step: FluentSettings) -> None:
        """Call the setters."""
        for name, given in self.setters.items():
            setter = getattr(step, name)
            known = inspect.signature(setter).parameters
            with self.at(name):
                words = given if isinstance(given, Mapping) else {}
                wrong = next((word for word in words if word not in known), None)
                if wrong is not None:
                    raise StrategyError(
                        f"plan {name}: it takes no {wrong!r}{near_miss(str(wrong), known)}; it takes {', '.join(known)}"
                    )
                first = [] if given is words or (given is True and not known) else [given]
                try:
                    inspect.signature(setter).bind(*first, **words)
                    setter(*first, **words)
                except (TypeError, AttributeError) as error:
                    raise StrategyError(f"plan {name}: {given!r} is no value of it: {error}") from None


class _Probe(FluentSettings):
    """Takes settings before there is a step, so that mistakes are found where the plan is read."""

    def __init__(self, parallel_mode: str | None) -> None:
        self.settings = ParallelSettings(parallel_mode or "semi_auto")


def read_plan(plan: Mapping[str, Any] | str | os.PathLike[str] | None) -> NamedPlan:
    """Return what a mapping or a YAML file says; None is the plan that the model brings.

    Raises:
        StrategyError: no such file, an unknown word, or a value that its setter does not take; with the line.
    """
    if plan is None or isinstance(plan, Mapping):
        return NamedPlan(plan) if plan is None or not _is_whole(plan) else _check(plan, "", {})
    source = os.fspath(plan)
    try:
        text = read_text(Path(source), MAX_BYTES)
        content, root = load_yaml(text), compose_yaml(text, max_depth=_DEPTH)
    except OSError as error:
        raise StrategyError(
            f"plan {source!r}: {error.strerror}; give the path of a YAML file, or a mapping of names to words"
        ) from None
    except TextError as error:
        raise StrategyError(f"{error.problem}; {error.remedy}", where=f"{source}:{error.line or 1}") from None
    except ValueError as error:
        raise StrategyError(f"plan {source!r}: {error}") from None
    if not isinstance(content, Mapping):
        raise StrategyError("a plan is a mapping of names to words, or has it under `names:`", where=f"{source}:1")
    lines = dict(_lines(root))
    if _is_whole(content):
        return _check(content, source, lines)
    names = {str(name): word for name, word in content.items()}
    return NamedPlan(names, source=source, lines={("names", *key): line for key, line in lines.items()})


def _is_whole(content: Mapping[str, Any]) -> bool:
    return "names" in content and not isinstance(content["names"], str)


def _lines(node: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the lines of the keys of the outer two mappings."""
    for key, value in getattr(node, "value", ()):
        path = (*before, str(key.value))
        yield path, key.start_mark.line + 1
        if not before and value.id == "mapping":
            yield from _lines(value, path)


def _check(content: Mapping[str, Any], source: str, lines: Mapping[tuple[str, ...], int]) -> NamedPlan:
    given = {str(word): _frozen(value) for word, value in content.items()}
    recompute = given.get("recompute", ())
    names_modules = not isinstance(recompute, Mapping)
    plan = NamedPlan(
        names=given["names"],
        tensor_parallel=given.get("tensor_parallel", 0),
        recompute=() if not names_modules else (recompute,) if isinstance(recompute, str) else recompute,
        stages=given.get("stages", {}),
        parallel_mode=given.get("parallel_mode"),
        setters={
            word: value
            for word, value in given.items()
            if word in SETTERS and not (word == "recompute" and names_modules)
        },
        source=source,
        lines=lines,
    )
    for word in given:
        with plan.at(word):
            if word not in WORDS_OF_PLANS:
                raise StrategyError(
                    f"plan {word!r}: no word of a plan{near_miss(word, WORDS_OF_PLANS)}; they are "
                    f"{', '.join(WORDS_OF_PLANS)}; names of modules stand under names"
                )
    _check_kind(plan, "names", plan.names, Mapping | None, "a mapping of names of modules to words")
    _check_kind(plan, "stages", plan.stages, Mapping, "a mapping of names of modules to stages")
    _check_kind(plan, "recompute", plan.recompute, tuple, "a list of names of modules")
    for name, stage in plan.stages.items():
        with plan.at("stages", name):
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise StrategyError(f"plan stages: {name}: {stage!r} must be a whole number, 0 or more")
    with plan.at("parallel_mode"):
        probe = _Probe(plan.parallel_mode)
    plan.set(probe)
    return plan


def _check_kind(plan: NamedPlan, word: str, value: Any, kind: Any, wanted: str) -> None:
    with plan.at(word):
        if not isinstance(value, kind):
            raise StrategyError(f"plan {word}: {value!r} must be {wanted}")


def _frozen(value: Any) -> Any:
    """Return a value with tuples for its lists, and names for the keys of its mappings."""
    if isinstance(value, Mapping):
        return {str(key): _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def give_plan(network: nn.Module, plan: NamedPlan) -> None:
    """Let an AutoParallel of a network be set as its plan says."""
    if plan.setters or plan.parallel_mode:
        vars(network)[_ATTRIBUTE] = plan


def plans_of(network: Any) -> list[NamedPlan]:
    """Return the plans with settings of a network and its parts, outermost first."""
    root: nn.Module = nn.Module()
    with suppress(CaptureError, ValueError):  # a function that finds its network later
        root = find_target(network).root
    modules = root.modules()
    return [vars(module)[_ATTRIBUTE] for module in modules if _ATTRIBUTE in vars(module)]
