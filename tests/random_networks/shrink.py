"""Shrinks a failing case: takes features away one by one as long as it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from random_networks.case import Case, Piece


def shrink(case: Case, still_fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case found that `still_fails`; greedy, from the biggest features to the smallest."""
    moved = True
    while moved:
        moved = False
        for smaller in simpler(case):
            if still_fails(smaller):
                case, moved = smaller, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Yield the case without some of its features, at first without many."""
    default = Case(case.world_size, case.family, ())
    if len(case.pieces) > 2:
        for index in range(len(case.pieces)):
            yield only_piece(case, index)
    for names in (("cuts", "hsdp", "pipeline", "wrappers", "settings"), ("habits", "finish", "clip", "form")):
        if sum(getattr(case, name) != getattr(default, name) for name in names) > 1:
            yield case.changed(**{name: getattr(default, name) for name in names})
    for index in range(len(case.pieces)):
        if len(case.pieces) > 1:
            yield without_piece(case, index)
    for index in range(len(case.habits)):
        yield case.changed(habits=case.habits[:index] + case.habits[index + 1 :])
    for name in ("cuts", "wrappers", "settings"):
        entries = getattr(case, name)
        for index in range(len(entries)):
            yield case.changed(**{name: entries[:index] + entries[index + 1 :]})
    plain = ("pipeline", "hsdp", "finish", "clip", "optimizer", "optimizer_made", "form", "is_16_bit", "from_words")
    for name in (*plain, "has_tied_head", "backward", "hidden", "chain", "returns", "loss", "mode"):
        value = ("sgd", {"lr": 0.05}) if name == "optimizer" else getattr(default, name)
        if getattr(case, name) == value or (name == "returns" and (case.hidden or case.backward == "retain")):
            continue
        changed = case.changed(**{name: value})
        yield changed.changed(has_tied_head=False) if name == "from_words" else changed
    if case.steps > 1:
        last = case.steps - 1
        kept = tuple(habit for habit in case.habits if habit[0] not in ("change", "evaluate", "smaller", "sizes", "eval_block", "weights", "read") or habit[1] < last)  # fmt: skip  # noqa: E501
        yield case.changed(steps=last, habits=kept)
    for index, piece in enumerate(case.pieces):
        if piece.wire != "chain":
            new = Piece(piece.kind, piece.options)
            yield case.changed(pieces=(*case.pieces[:index], new, *case.pieces[index + 1 :]))
    if case.dataset == "data_parallel":
        yield case.changed(dataset="full_batch")
    if case.pipeline is not None:
        simple = {**case.pipeline, "scheduler": "gpipe", "interleave": False}
        if case.pipeline != simple:
            yield case.changed(pipeline=simple)
    if case.hsdp is not None and case.hsdp["optimizer_level"] != "level1":
        yield case.changed(hsdp={**case.hsdp, "optimizer_level": "level1"})
    for index, (path, arguments) in enumerate(case.cuts):
        if "out_strategy" in arguments:
            fewer = {name: value for name, value in arguments.items() if name != "out_strategy"}
            yield case.changed(cuts=(*case.cuts[:index], (path, fewer), *case.cuts[index + 1 :]))
    if case.world_size > 2 and not case.cuts:
        yield case.changed(world_size=2, pipeline={**case.pipeline, "stages": 2} if case.pipeline else None)


def only_piece(case: Case, index: int) -> Case:
    """Return the case with one of its blocks alone."""
    for last in reversed(range(len(case.pieces))):
        if last != index:
            case = without_piece(case, last)
    return case


def without_piece(case: Case, index: int) -> Case:
    """Return the case without one block, and with what names the others under their new numbers."""
    pieces = case.pieces[:index] + case.pieces[index + 1 :]
    habits = []
    for habit in case.habits:
        places = {"change": (2,), "eval_block": (2,), "frozen": (1,), "recompute": (1,), "tie": (1, 2), "hook": (2,)}
        places |= {"write": (1,), "weights": (2,), "read": (2,)}
        numbers = places.get(habit[0], ())
        if any(habit[place] == index for place in numbers):
            continue
        habits.append(
            tuple(value - 1 if place in numbers and value > index else value for place, value in enumerate(habit))
        )
    cuts = []
    for path, arguments in case.cuts:
        if path.startswith("blocks."):
            number, _, rest = path.removeprefix("blocks.").partition(".")
            if int(number) == index:
                continue
            path = f"blocks.{int(number) - (int(number) > index)}.{rest}"
        cuts.append((path, arguments))
    chain = case.chain - (case.chain > index)
    return case.changed(pieces=pieces, habits=tuple(habits), cuts=tuple(cuts), chain=chain)
