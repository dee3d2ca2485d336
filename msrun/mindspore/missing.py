"""Names of MindSpore that are not here: the error says what is near and what to use."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable

import torch

from msrun.errors import near_miss

REMEDIES = {
    "mindrecord": "read the records with MindSpore's mindrecord.FileReader and give them to dataset.GeneratorDataset",
    "MindDataset": "MindRecord files are not read here; use dataset.GeneratorDataset over the records",
    "TFRecordDataset": "use dataset.GeneratorDataset over the records",
    "ImageFolderDataset": "use dataset.GeneratorDataset over the files (PIL.Image.open)",
    "Schema": "give the columns' names to dataset.GeneratorDataset",
    "Custom": "write the operator with torch's functions; gradients follow by themselves",
    "Morph": "write the operator with torch's functions; gradients follow by themselves",
    "SummaryCollector": "use a train.Callback that writes with torch.utils.tensorboard",
    "SummaryRecord": "use torch.utils.tensorboard.SummaryWriter",
    "rewrite": "change the cell's attributes: it is a torch module",
    "load_mindir": "save_checkpoint and load_checkpoint keep weights; export writes a program of torch.export",
    "thor": "use nn.Momentum or nn.Lamb",
    "boost": "use AutoParallel(...).mixed_precision and comm_fusion",
    "COOTensor": "use torch.sparse_coo_tensor",
    "CSRTensor": "use torch.sparse_csr_tensor",
    "RowTensor": "use torch.sparse_coo_tensor",
}
"""Last part of a name -> what to use in its place."""


def missing_name(path: str, name: str, known: Iterable[str]) -> Exception:
    """Return the error for `mindspore.PATH.NAME`: an AttributeError, or in `from ... import` an ImportError."""
    text = describe_missing(f"{path}.{name}" if path else name, known)
    caller = sys._getframe(2)
    here = caller.f_code.co_code[caller.f_lasti] if caller.f_lasti >= 0 else 0
    return ImportError(text) if dis.opname[here] == "IMPORT_FROM" else AttributeError(text)


def describe_missing(dotted: str, known: Iterable[str]) -> str:
    """Return the sentence for a name below `mindspore` that is not here."""
    name = dotted.rpartition(".")[2]
    words = [] if name in REMEDIES else [word for word in known if not word.startswith("_")]
    near = near_miss(name, words, cutoff=0.75)
    return f"mindspore.{dotted} is not in msrun.mindspore{near}; {remedy(dotted)}"


def remedy(dotted: str) -> str:
    """Return what to use in place of a missing name."""
    parts = dotted.split(".")
    for part in reversed(parts):
        if part in REMEDIES:
            return REMEDIES[part]
    name = parts[-1]
    if "dataset" in parts:
        return "use dataset.GeneratorDataset, or a function given to map"
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    for holder, word in ((torch.nn, name), (torch, snake), (torch.nn.functional, snake), (torch.linalg, snake)):
        if not name.startswith("_") and hasattr(holder, word):
            return f"use {holder.__name__}.{word}: tensors and cells here are torch's"
    return "write it with torch's functions: tensors and cells here are torch's"
