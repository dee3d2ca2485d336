"""Rules that Kubernetes has for names, paths, images and references to variables. Pure; nothing here raises."""

from __future__ import annotations

import re

MAX_LABEL_LENGTH = 63
"""Longest DNS label, so also the longest pod host name (RFC 1123, section 2.1)."""

RANK_VARIABLES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX", "PET_NODE_RANK", "RANK")
"""Variables that the job controllers put into each container to tell its index."""

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
_SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_SECRET_VARIABLE = re.compile(r"(.*_)?(PASSWORD|PASSWD|SECRET|TOKEN|APIKEY|API_KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)")
_VOCABULARY_TOKEN = re.compile(r"(.*_)?(BOS|EOS|PAD|UNK|MASK|SEP|CLS)_TOKEN")


def is_label(text: str) -> bool:
    """Whether `text` is a DNS-1123 label: at most 63 of a-z, 0-9 and -, not at either end."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_service_name(text: str) -> bool:
    """Whether `text` is a DNS-1035 label: a DNS-1123 label that starts with a letter, as Service names must."""
    return len(text) <= MAX_LABEL_LENGTH and _SERVICE.fullmatch(text) is not None


def is_subdomain(text: str) -> bool:
    """Whether `text` is a DNS-1123 subdomain: labels joined by dots, at most 253 characters."""
    return len(text) <= 253 and all(_LABEL.fullmatch(part) for part in text.split("."))


def is_label_value(text: str) -> bool:
    """Whether `text` may be the value of a Kubernetes label."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL_VALUE.fullmatch(text) is not None


def is_qualified_name(text: str) -> bool:
    """Whether `text` may be the key of a label or the name of an extended resource: [DOMAIN/]NAME."""
    domain, slash, name = text.rpartition("/")
    return bool(name) and is_label_value(name) and (not slash or is_subdomain(domain))


def is_variable(text: str) -> bool:
    """Whether `text` is an environment variable name that every shell can use."""
    return _VARIABLE.fullmatch(text) is not None


def is_image(text: str) -> bool:
    """Whether `text` is an image reference: [REGISTRY[:PORT]/]NAME[:TAG][@sha256:DIGEST]."""
    return _IMAGE.fullmatch(text) is not None


def is_absolute_path(text: str) -> bool:
    """Whether `text` is a plain absolute path without `.` and `..` parts."""
    return _PATH.fullmatch(text) is not None and not {".", ".."} & set(text.split("/"))


def is_secret_key(text: str) -> bool:
    """Whether `text` may be a key inside a Secret."""
    return _SECRET_KEY.fullmatch(text) is not None


def is_secret_variable(name: str) -> bool:
    """Whether a variable of this name usually holds a secret: HF_TOKEN does, PAD_TOKEN and TOKENIZER_PATH do not."""
    upper = name.upper()
    return _SECRET_VARIABLE.fullmatch(upper) is not None and _VOCABULARY_TOKEN.fullmatch(upper) is None


# References to environment variables inside container arguments. The kubelet expands $(NAME) in command, args and env
# values, leaves an unknown name as it is, and turns $$ into $
# (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/).
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
