"""Verdict on one habit in one mode: equal to one process, refused by name, different, or an error of somebody else."""

import torch
from random_networks.verdict import PEER_LEFT, Verdict, differ, first_own, hides_an_internal_error


def judge(alone, halves, ranks, limit):
    """Compare the ranks with the one process, and with one that takes half of the rows at a time.

    The kind is equal; refused, by the class of an error and its text; own rows: equal to one process that takes half of
    the rows at a time; WRONG; raw error; or invalid: the script fails in one process too.

    Args:
        limit: the largest difference, relative to a tensor's largest value.
    """
    if alone.kind != "done":
        return Verdict("invalid", alone.error, alone.trace)
    for rank, report in enumerate(ranks):
        if report.kind == "error" and not PEER_LEFT.search(report.message):
            return Verdict("raw error", f"rank {rank}: {report.error}", report.trace)
    refused = [report for report in ranks if report.kind == "refused"]
    if refused:
        own = first_own(refused)
        return Verdict("raw error" if hides_an_internal_error(own.error) else "refused", own.error, own.trace)
    for rank, report in enumerate(ranks):
        if report.kind != "done":
            return Verdict("raw error", f"rank {rank}: {report.error}", report.trace)
    notes = [report.trained for report in ranks]
    difference = compare(alone.trained, notes, limit)
    if difference and halves.kind == "done" and not compare(halves.trained, notes, limit):
        return Verdict("own rows", difference)
    return Verdict("WRONG", difference) if difference else Verdict("equal")


def compare(right, ranks, limit):
    """Return the first thing that differs, in words; nothing when all is equal."""
    if any(len(notes) != len(right) for notes in ranks):
        return f"{len(right)} notes in one process, {[len(notes) for notes in ranks]} on the ranks"
    for place, note in enumerate(right):
        told = difference_at(note, [notes[place] for notes in ranks], limit)
        if told:
            return f"{note.name}: {told}"
    return ""


def difference_at(right, ranks, limit):
    values = [note.value for note in ranks]
    if right.kind == "mean":
        mean = sum(values) / len(values)
        is_nan = mean != mean and right.value != right.value
        if not is_nan and not (abs(mean - right.value) <= limit * max(1.0, abs(right.value))):
            return f"{mean:.9g}, of one process {right.value:.9g}"
    elif right.kind == "whole":
        for rank, value in enumerate(values):
            if (found := differ(value, right.value)) > limit:
                return f"off by {found:.1e} on rank {rank}"
    elif right.kind == "rows":
        # Modes differ in who passes the whole batch; a rank that has passed all of it gets all results.
        joined = values[0] if values[0].shape == right.value.shape else torch.cat(list(values))
        if (found := differ(joined, right.value)) > limit:
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
