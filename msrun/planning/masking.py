"""Secrets in command lines, addresses and lines of text: hidden wherever msrun prints or writes them.

The workers get the real values. What a program's name is does not matter, only how its words look:

    --api_key VALUE   --token=VALUE   PASSWORD=VALUE   trainer.api_key=VALUE   https://user:VALUE@host

A name is taken apart at `_`, `-`, `.` and capital letters. PASSWORD, PASSWD, SECRET and CREDENTIAL are enough anywhere
in it. KEY and TOKEN are everyday words in training (`--num_keys`, `--tokenizer`, `--key_dim`, `--max_tokens`,
`--num_key_value_heads`, `--pad_token_id`), so they count only as the last word and in the singular: `--api_key`,
`--hf-token`, `accessToken`, `--key`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

MASK = "********"
MIN_SECRET_CHARS = 4
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose values are hidden; there a value too many is hidden rather than one too few."""

_ALWAYS = re.compile(r"SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_LAST_WORD = re.compile(r"(api|access|secret|private|auth)?(key|token)\Z", re.IGNORECASE)
_WORD_BORDER = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_ASSIGNMENT = re.compile(r"([-+]*[A-Za-z_][\w.-]*)=")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*\Z")
_URL_PASSWORD = re.compile(r"((?<![A-Za-z0-9+.-])[0-9+.-]*+[A-Za-z][A-Za-z0-9+.-]*+://[^/\s:@]*+):([^/\s@]++)@")
"""Tried once for every run of letters, not for every letter: the time grows with the text, not with its square."""


def is_secret_name(name: str) -> bool:
    if not SECRET_NAME.search(name):
        return False
    words = [word for word in _WORD_BORDER.split(name) if word]
    return bool(_ALWAYS.search(name) or (words and _LAST_WORD.match(words[-1])))


def mask_url(text: str) -> str:
    """Return `text` with the passwords of `scheme://user:password@host` hidden."""
    return _URL_PASSWORD.sub(rf"\1:{MASK}@", text) if "://" in text else text


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the values of secret-looking names and passwords in URLs hidden, for plans, logs and events."""
    return {name: MASK if SECRET_NAME.search(name) else mask_url(value) for name, value in env.items()}


def mask_words(words: Sequence[str]) -> list[str]:
    return [shown for shown, _ in _masked(words)]


def secret_values(words: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that `mask_words` hides and the secrets in `env`, longest first; those of fewer than
    `MIN_SECRET_CHARS` are left out: hiding every `1` of a text would hide the text.
    """
    found = {secret for _, secrets in _masked(words) for secret in secrets}
    for name, value in env.items():
        found |= {value} if SECRET_NAME.search(name) else {password for _, password in _URL_PASSWORD.findall(value)}
    return tuple(sorted((one for one in found if len(one) >= MIN_SECRET_CHARS), key=lambda one: (-len(one), one)))


def hide_values(text: str, values: Sequence[str]) -> str:
    for value in values:
        text = text.replace(value, MASK)
    return text


def _masked(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each word as it may be shown, with its secrets; what begins with -- is no secret option's value."""
    is_value = False
    for word in words:
        is_value = is_value and not word.startswith("--")
        yield (MASK, [word]) if is_value else _masked_word(word)
        is_value = not is_value and bool(_OPTION.match(word)) and is_secret_name(word)


def _masked_word(word: str) -> tuple[str, list[str]]:
    begin = 0
    while match := _ASSIGNMENT.match(word, begin):
        begin = match.end()
        if begin < len(word) and is_secret_name(match[1]):
            return word[:begin] + MASK, [word[begin:]]
    value = word[begin:]
    return word[:begin] + mask_url(value), [password for _, password in _URL_PASSWORD.findall(value)]
