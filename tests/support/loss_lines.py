"""The lines in which programs tell a loss: `epoch: 1 step: 2, loss is 0.5`, also with more commas or without epochs."""

import re

import numpy as np

_LINE = re.compile(r"(?:epoch: (\d+),? )?step: (\d+), loss is (\S+)$", re.MULTILINE)


def losses(text):
    """Return (epoch, step, loss) of every line; the epoch is 0 where none is told."""
    return np.array([[float(value or 0) for value in line] for line in _LINE.findall(text)])
