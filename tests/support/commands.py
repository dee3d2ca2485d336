"""Commands on a PATH of a test's own."""

import os
import sys


def command_path(folder, commands, others=os.environ["PATH"]):
    """Make commands in a folder's `bin` that run Python with some words, by name; return a PATH with them first."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    for name, words in commands.items():
        (place / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (place / name).chmod(0o755)
    return f"{place}{os.pathsep}{others}"
