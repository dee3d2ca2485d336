"""Rules that Kubernetes has for names, paths, images and references to variables. Pure; nothing here raises.

A name in capitals is a pattern that a whole text has to match.
"""

import re

MAX_LABEL_LENGTH = 63
"""Longest DNS label, so also the longest pod host name (RFC 1123, section 2.1)."""

RANK_VARIABLES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX", "PET_NODE_RANK", "RANK")
"""Variables that the job controllers put into each container to tell its index."""

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""A DNS-1123 label."""
SERVICE = rf"(?=[a-z]){LABEL}"
"""A DNS-1035 label: a DNS-1123 label that starts with a letter, as Service names must."""
SUBDOMAIN = r"(?![^/:]{254})[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""A DNS-1123 subdomain: labels joined by dots."""
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = rf"({_NAME})?"
RESOURCE = rf"{SUBDOMAIN}/{_NAME}"
"""Name of an extended resource."""
QUALIFIED = rf"({SUBDOMAIN}/)?{_NAME}"
"""Key of a label: [DOMAIN/]NAME."""
FREE_LABEL = rf"(?!app\.kubernetes\.io/){QUALIFIED}"
OWN_VARIABLE = rf"(?!({'|'.join(RANK_VARIABLES)})\Z)[A-Za-z_][A-Za-z0-9_]*"
"""A variable that every shell can use, and no controller sets."""
IMAGE = r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
"""[REGISTRY[:PORT]/]NAME[:TAG][@sha256:DIGEST]."""
_PART = r"/(?!\.{1,2}(/|:|\Z))[A-Za-z0-9._-]+"
PATH = rf"({_PART})+"
"""A plain absolute path without `.` and `..` parts."""
NESTED_PATH = rf"({_PART}){{2,}}"
MOUNT = rf"{PATH}(:ro)?"
SECRET_SOURCE = rf"{SUBDOMAIN}:[-._a-zA-Z0-9]{{1,253}}"
"""SECRET:KEY."""
LONG_OPTION = r"[a-z][a-z0-9-]*"
SHORT_OPTION = r"[A-Za-z][a-z]{0,9}"
PROCESS_TEXT = r"[^\0\ud800-\udfff]*"
"""What a process can be given as argument or value of a variable: UTF-8 without NUL."""
LINE = r"[^\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*"
_SECRET_VARIABLE = r"(.*_)?(PASSWORD|PASSWD|SECRET|TOKEN|APIKEY|API_KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)"  # noqa: S105
_VOCABULARY_TOKEN = r"(.*_)?(BOS|EOS|PAD|UNK|MASK|SEP|CLS)_TOKEN"  # noqa: S105


def fits(pattern: str, text: str) -> bool:
    """Whether the whole text matches."""
    return re.fullmatch(pattern, text) is not None


def is_secret_variable(name: str) -> bool:
    """Whether a variable of this name usually holds a secret: HF_TOKEN does, PAD_TOKEN and TOKENIZER_PATH do not."""
    return fits(_SECRET_VARIABLE, name.upper()) and not fits(_VOCABULARY_TOKEN, name.upper())


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
