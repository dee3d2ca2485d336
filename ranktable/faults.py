"""Says in plain words why a text is not JSON: what the file is instead, or which usual mistake stands where."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import NamedTuple

_MAGIC = (
    (b"\x1f\x8b", "gzip data", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "unpack it with unzstd"),
    (b"BZh", "bzip2 data", "unpack it with bunzip2"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
_MIN_BASE64 = 16
_HEAD_BYTES = 4096

_TEXTS = (
    (r"<!doctype html|<html", "an HTML page", "fetch the table itself; a login or error page was saved in its place"),
    (r"<\?xml|<[a-z][\w.:-]*[\s>/]", "XML", "write the table as JSON"),
    (r"version https://git-lfs", "a Git LFS pointer", "run git lfs pull"),
    (r"<{7} ", "a file with merge conflicts", "resolve them first"),
    (r"`{3}", "a Markdown code block", "keep only what stands between the lines of backquotes"),
    (r"kind:\s|apiVersion:\s", "a Kubernetes manifest in YAML", "take the table out of its data, as a file of its own"),
    (r"(?:---|%YAML)|[\"']?[A-Za-z_][\w .-]*[\"']?:(?:\s|$)|- [\w\"'{]", "YAML", "write the table as JSON"),
    (r"\S+\s+slots\s*=\s*\d|[\w.-]+:\d+\s*$", "a host file", "make a table of it with ranktable generate"),
)
_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE | re.MULTILINE), name, remedy) for pattern, name, remedy in _TEXTS)


def name_bytes(data: bytes) -> tuple[str, str] | None:
    """Return what bytes that are no text are, and what to do; None when nothing gives them away."""
    for magic, name, remedy in _MAGIC:
        if data.startswith(magic):
            return f"the file is {name}, not JSON", remedy
    if data and not data.strip(b"\0"):
        return "the file holds nothing but NUL bytes", "write it again; it never reached the disk"
    return None


def name_text(text: str) -> tuple[str, str] | None:
    """Return what a text that does not start with a brace is, and what to do; None when nothing gives it away."""
    head = text[:_HEAD_BYTES].lstrip("\ufeff \t\r\n")
    if not head or head.startswith(("{", '"')):
        return None
    packed = _name_base64(head)
    if packed:
        return packed
    for pattern, name, remedy in _PATTERNS:
        if pattern.match(head):
            return f"the file is {name}, not JSON", remedy
    return None


def _decode_base64(text: str) -> bytes:
    """Return the bytes of a text in base64, which may be cut; none of what is something else."""
    if not _BASE64.fullmatch(text):
        return b""
    plain = "".join(text.split())
    try:
        return base64.b64decode(plain[: len(plain) // 4 * 4])
    except binascii.Error:
        return b""


def _name_base64(head: str) -> tuple[str, str] | None:
    """kubectl shows binary data in base64."""
    content = _decode_base64(head) if len(head) >= _MIN_BASE64 else b""
    inner = name_bytes(content)
    if inner:
        kind = inner[0].removeprefix("the file is ").removesuffix(", not JSON")
        return f"the file is {kind} in base64, not JSON", "decode it with base64 -d, then unpack it"
    if content.lstrip().startswith((b"{", b"[")):
        return "the file is JSON in base64", "decode it with base64 -d"
    return None


_LAST_COMMA = re.compile(r",\s*\Z")
_QUOTE_IT = "write a string in double quotes"
_ANYTHING = ""
# What the parser says, what stands where it gave up, the message ({} for the first character) and the remedy.
_MISTAKES = (
    (_ANYTHING, r"//|/\*|#", "a comment stands here, which JSON does not allow", "remove the comment"),
    (
        _ANYTHING,
        r"\.\.|\u2026",
        "an elision (...) stands here instead of entries",
        "write the entries that it leaves out",
    ),
    (
        _ANYTHING,
        r"['`\u2018\u2019\u201c\u201d]",
        "a quotation mark stands here that JSON does not know",
        'use plain ones, "',
    ),
    (_ANYTHING, r"True|False|None", "True, False and None are no JSON values", _QUOTE_IT),
    (_ANYTHING, r"-?(?:NaN|Infinity)", "NaN and Infinity are no JSON values", _QUOTE_IT),
    (
        _ANYTHING,
        r"\{[{%]|\$\{?\w|<[\w ]+>|%\(?\w",
        "a placeholder of a template stands here",
        "fill the template in first",
    ),
    (_ANYTHING, r"[<=>]{7}", "a mark of a merge conflict stands here", "resolve the conflict first"),
    (_ANYTHING, r"\0", "NUL bytes stand here", "write the file again; its end never reached the disk"),
    (_ANYTHING, r"[-+]?(?:0[xXoObB\d]|\.\d)|[+]\d", "a number stands here that JSON does not know", _QUOTE_IT),
    (_ANYTHING, r",", "a comma stands here with nothing before it", "remove it, or write what is missing"),
    (
        "Expecting property",
        r"[A-Za-z_][\w-]*\s*:",
        "a key stands here without double quotes",
        "put it in double quotes",
    ),
    ("Invalid \\esc", _ANYTHING, "a backslash stands here that starts no escape of JSON", "double it, or remove it"),
    ("Invalid control", _ANYTHING, "a line break or control character stands inside a string", "close it before that"),
    (_ANYTHING, r"[^ -~]", "the character {} stands here, which JSON does not know", "replace it"),
    ("Extra data", r"[}\]]", "there is a closing bracket too many", "remove it"),
    ("Extra data", r"\{", "a second object follows after the table", "keep one JSON object in the file"),
    ("Extra data", _ANYTHING, "text follows after the end of the table", "keep one JSON object in the file"),
    (_ANYTHING, r"[}\]]", "{} closes what another bracket has opened", "write the bracket that fits"),
    ("Expecting ','", _ANYTHING, "a comma or a closing bracket is missing before this place", "add it"),
)


class Fault(NamedTuple):
    """Where a text stops to be JSON, why, and what to do."""

    offset: int
    message: str
    remedy: str


def explain_fault(text: str, error: json.JSONDecodeError) -> Fault:
    """Return the fault behind `error`; its place is that of the mistake, not where the parser gave up."""
    offset = error.pos
    rest = text[offset : offset + 40]
    comma = _LAST_COMMA.search(text[max(0, offset - 4096) : offset])
    if not text.strip():
        return Fault(0, "the file is empty", "write the table again")
    foreign = name_text(text)
    if foreign:
        return Fault(len(text) - len(text.lstrip()), *foreign)
    if error.msg.startswith("Illegal trailing comma"):
        return _trailing_comma(offset)
    if comma and rest[:1] in ("}", "]"):
        return _trailing_comma(offset - len(comma.group()))
    if offset >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
        return Fault(offset, "the text ends in the middle of the table", "copy or write the whole file again")
    if text[offset - 1 : offset] == "0" and rest[:1] in tuple("0123456789xX"):
        return Fault(offset - 1, "a number stands here that JSON does not know", _QUOTE_IT)
    if text[offset - 1 : offset + 1] == "{{":
        return Fault(offset - 1, "a placeholder of a template stands here", "fill the template in first")
    for says, pattern, message, remedy in _MISTAKES:
        if error.msg.startswith(says) and re.match(pattern, rest):
            shown = rest[:1] if " " < rest[:1] <= "~" else ascii(rest[:1])
            return Fault(offset, message.format(shown), remedy)
    return Fault(offset, f"the text is not JSON here ({error.msg})", "correct the text at this place")


def _trailing_comma(offset: int) -> Fault:
    return Fault(offset, "a comma stands after the last item, which JSON does not allow", "remove the comma")
