"""What the ranks of a world, and one process beside them, say of the same work: a file each in a test's folder."""

import os
import pickle
import traceback
import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from msrun import contract
from msrun.errors import MsrunError


@dataclass(frozen=True)
class Note:
    """What a piece of work has seen at one place."""

    kind: str
    """mean: a number, the same in the mean over the ranks; rows: this rank's rows; whole: the same on every rank;
    named: whole tensors by name, each on one rank at least; of ranks: those of each rank, where they may differ."""
    name: str
    value: Any


def whole_of(value):
    """Return a copy of the whole of a tensor of which this rank may have a part."""
    whole = getattr(value, "full_tensor", lambda: value)()
    return whole.detach().clone()


@dataclass
class Report:
    """How a piece of work has ended."""

    kind: str
    """done, refused or error"""
    found: Any = None
    """What the work returned."""
    error: str = ""
    """Type and message."""
    message: str = ""
    trace: str = ""


def report_of(work):
    """Run `work` and say how it ended."""
    try:
        return Report("done", work())
    except BaseException as error:
        kind, text = "refused" if isinstance(error, MsrunError) else "error", str(error)
        return Report(kind, None, f"{type(error).__name__}: {text}", text, traceback.format_exc())


def report_alone(work):
    """Run `work` in this process, whose settings of torch stay as they were."""
    dtype, semantics = torch.get_default_dtype(), {contract.MSRUN_MINDSPORE_SEMANTICS: "torch"}
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(), mock.patch.dict(os.environ, semantics):
            warnings.simplefilter("ignore")
            return report_of(work)
    finally:
        torch.set_default_dtype(dtype)


def tell(folder, rank, work):
    """Run `work` on a rank, and leave its report. A rank whose work has not ended well leaves its world, too: others
    may be at another place."""
    report = report_of(work)
    (folder / f"{rank}").write_bytes(pickle.dumps(report))
    if report.kind != "done":
        os._exit(0)


def told(folder, ranks):
    """Return the reports of all ranks."""
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(ranks)]
