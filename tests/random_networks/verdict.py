"""Verdict: is a parallel run equal to one process, refused by name, or wrong?"""

import re
from dataclasses import dataclass

import torch

GOOD = ("equal", "refused", "invalid")
PEER_LEFT = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Connection refused|gloo.*(Timed out|timeout)", re.I
)
HEARD = ("cannot run this call", "CollectiveError: ")
"""What a rank says that has heard of the others' error."""
_ONE_RANKS_OWN = re.compile(r"torch\.optim\.|so a norm here")
"""Refusals outside of calls that all ranks make together: others may have nothing to refuse, and msrun ends them."""
_INTERNAL = re.compile(r"out of range|object is not|has no attribute|KeyError|IndexError|AssertionError|NoneType")
"""Words of Python's own errors: a refusal that quotes one hides it."""


@dataclass(frozen=True)
class Verdict:
    """What came out."""

    kind: str
    """equal; refused; own rows: equal to one process that takes half of the rows at a time; different; internal error;
    refused by some ranks; several lines; invalid: the one process fails, so the case proves nothing."""
    message: str = ""
    trace: str = ""

    @property
    def is_good(self):
        """Return whether the promise is kept, as far as the case can tell."""
        return self.kind in GOOD

    @property
    def reason(self):
        """The message without numbers and names, so that equal reasons can be counted."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", self.message)
        text = re.sub(r"\b(blocks|network)\.[\w.]+", "...", text)
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)[:160]


def judge(alone, ranks, limit, halves=None):
    """Compare the ranks with the one process.

    Args:
        limit: the largest difference, relative to a tensor's largest value.
        halves: of one process that takes half of the rows at a time.
    """
    refused = [report for report in ranks if report.kind == "refused"]
    broken = [(rank, report) for rank, report in enumerate(ranks) if report.kind == "error"]
    own = [(rank, report) for rank, report in broken if not PEER_LEFT.search(report.message)]
    if alone.kind != "done":
        if alone.kind == "refused" and len(refused) == len(ranks):
            return Verdict("refused", first_own(refused).error)
        return Verdict("invalid", f"one process: {alone.error}", alone.trace)
    for rank, report in own:
        return Verdict("internal error", f"rank {rank}: {report.error}", report.trace)
    if refused and _ONE_RANKS_OWN.search(first_own(refused).error) and not own:
        return Verdict("refused", first_own(refused).error)
    if refused and len(refused) < len(ranks):
        return Verdict("refused by some ranks", f"{refused[0].error}; others left", refused[0].trace)
    if broken:
        return Verdict("internal error", f"rank {broken[0][0]}: {broken[0][1].error}", broken[0][1].trace)
    if refused:
        several = [report for report in refused if "\n" in report.message.strip()]
        if several:
            return Verdict("several lines", several[0].error, several[0].trace)
        reason = first_own(refused).error
        if hides_an_internal_error(reason):
            return Verdict("internal error", reason, refused[0].trace)
        if reason.startswith("VerificationError"):  # a step that is wrong, or a check that is
            return Verdict("different", reason, refused[0].trace)
        return Verdict("refused", reason)
    notes = [report.found for report in ranks]
    difference = compare(alone.found, notes, limit)
    if difference and halves is not None and halves.kind == "done" and not compare(halves.found, notes, limit):
        return Verdict("own rows", difference)
    return Verdict("different", difference) if difference else Verdict("equal")


def hides_an_internal_error(reason):
    """Return whether a refusal quotes an error of Python's own."""
    return bool(_INTERNAL.search(reason))


def first_own(refused):
    """Return the report of the rank that met the reason itself."""
    own = [report for report in refused if not any(words in report.error for words in HEARD)]
    return (own or refused)[0]


def compare(right, ranks, limit):
    """Return the first thing that differs, in words; nothing when all is equal."""
    if any(len(notes) != len(right) for notes in ranks):
        return f"{len(right)} notes in one process, {[len(notes) for notes in ranks]} on the ranks"
    for place, note in enumerate(right):
        told = _difference_at(note, [notes[place].value for notes in ranks], limit)
        if told:
            return f"{note.name}: {told}"
    return ""


def _difference_at(right, values, limit):
    if right.kind == "mean":
        mean = sum(values) / len(values)
        is_nan = mean != mean and right.value != right.value
        if not is_nan and not (abs(mean - right.value) <= limit * max(1.0, abs(right.value))):
            return f"{mean:.9g}, of one process {right.value:.9g}"
    elif right.kind == "whole":
        for rank, value in enumerate(values):
            if (found := differ(value, right.value)) > limit:
                return f"off by {found:.1e} on rank {rank}: {_short(value)}, right {_short(right.value)}"
    elif right.kind == "rows":
        # Modes differ in who passes the whole batch; a rank that has passed all of it gets all results.
        joined = values if values[0].shape == right.value.shape else [torch.cat(list(values))]
        if (found := max(differ(each, right.value) for each in joined)) > limit:
            return f"off by {found:.1e}"
    elif right.kind == "of ranks":
        for of_rank, value in zip(right.value, values, strict=True):
            if found := _difference_of_names(of_rank, [value], limit):
                return found
    else:
        return _difference_of_names(right.value, values, limit)
    return ""


def _difference_of_names(right, ranks, limit):
    extra = sorted({name for value in ranks for name in value} - right.keys())
    if extra:
        return f"{', '.join(extra)}: not there in one process"
    for name, value in right.items():
        found = [
            differ(mine[name], value) for mine in ranks if name in mine and (mine[name].numel() or not value.numel())
        ]
        if not found:
            return f"{name} is on no rank"
        if max(found) > limit:
            return f"{name} off by {max(found):.1e}"
    return ""


def differ(mine, right):
    """Return the largest difference relative to the largest value, which counts as 1e-3 at least; inf for a shape."""
    if mine.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    mine, right = mine.double(), right.double()
    scale = max(float(right.abs().max()), 1e-3)
    difference = float((mine - right).abs().max()) / scale
    return difference if difference == difference else float("inf")


def _short(tensor):
    return "[" + ", ".join(f"{value:.9g}" for value in tensor.flatten()[:8].tolist()) + "]"
