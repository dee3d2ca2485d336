"""References to environment variables inside container arguments.

The kubelet expands `$(NAME)` in command, args and env values, leaves an unknown name as it is, and turns `$$` into `$`
(https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/). Text of the
user has to come through this unchanged; the node rank has to be such a reference.
"""

from __future__ import annotations

import re

_REFERENCE = re.compile(r"\$(?:\((?P<kubelet>[^()]+)\)|\{(?P<braced>[A-Za-z_]\w*)\}|(?P<bare>[A-Za-z_]\w*))")


def escape_references(text: str) -> str:
    """Text that the kubelet turns back into exactly `text`.

    Only text that the kubelet would change is changed: a shell's `$HOME` stays readable.

    >>> escape_references("$HOME"), escape_references("$(HOME)")
    ('$HOME', '$$(HOME)')
    """
    if "$(" in text or "$$" in text:
        return text.replace("$", "$$")
    return text


def find_reference(text: str) -> str | None:
    """Name of the variable when the whole `text` refers to one: `$(NAME)`, `${NAME}` or `$NAME`; None otherwise."""
    match = _REFERENCE.fullmatch(text)
    return next(name for name in match.groups() if name) if match else None
