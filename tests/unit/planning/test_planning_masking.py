"""Which words of a command line are secrets, and that no more than those are hidden."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.masking import MASK, hide_values, is_secret_name, mask_url, mask_words, secret_values

SECRET = [
    "--api_key",
    "--api-key",
    "--apikey",
    "--apiKey",
    "--key",
    "--token",
    "--hf_token",
    "--accessToken",
    "--wandb.api_key",
    "--password",
    "--dbpassword",
    "--PASSWD",
    "--secret",
    "--client_secret_value",
    "--credentials",
    "AWS_SECRET_ACCESS_KEY",
]
PLAIN = [
    "--keyboard",
    "--num_keys",
    "--keys",
    "--key_dim",
    "--num_key_value_heads",
    "--monkey",
    "--tokenizer",
    "--tokens",
    "--max_tokens",
    "--pad_token_id",
    "--tokenizer_name",
    "--lr",
    "--pass",
]


@pytest.mark.parametrize("name", SECRET)
def test_value_of_a_secret_name_is_hidden_in_both_forms(name: str) -> None:
    assert is_secret_name(name)
    assert mask_words([f"{name}=hunter2", "x"]) == [f"{name}={MASK}", "x"]
    if name.startswith("--"):
        assert mask_words(["a.py", name, "hunter2", "x"]) == ["a.py", name, MASK, "x"]


@pytest.mark.parametrize("name", PLAIN)
def test_everyday_words_of_training_are_not_hidden(name: str) -> None:
    assert not is_secret_name(name)
    assert mask_words([f"{name}=64", name, "64"]) == [f"{name}=64", name, "64"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--token --verbose x", "--token --verbose x"),
        ("--token -x1", f"--token {MASK}"),
        ("--token --token a", f"--token --token {MASK}"),
        ("--token a b", f"--token {MASK} b"),
        ("--token= b", "--token= b"),
        ("--token", "--token"),
        ("token a", "token a"),
        ("--set api_key=a=b --set=api_key=c", f"--set api_key={MASK} --set=api_key={MASK}"),
        ("+trainer.api_key=a", f"+trainer.api_key={MASK}"),
        ("https://u:p@host/x", f"https://u:{MASK}@host/x"),
        ("--url=https://u:p@p/", f"--url=https://u:{MASK}@p/"),
        ("redis://:p@h,redis://:q@h", f"redis://:{MASK}@h,redis://:{MASK}@h"),
        ("https://host:80/a@b git@host:a", "https://host:80/a@b git@host:a"),
        ("ssh://git@host", "ssh://git@host"),
    ],
)
def test_words_are_shown_as(words: str, shown: str) -> None:
    assert mask_words(words.split(" ")) == shown.split(" ")


def test_values_are_found_for_hiding_them_elsewhere() -> None:
    words = ["--token", "abcdef", "--api_key=xy", "--lr", "0.1", "http://u:pass1@h"]
    values = secret_values(words, {"API_KEY": "abcdefgh", "HOME": "/root", "URL": "http://u:pass2@h"})
    assert values == ("abcdefgh", "abcdef", "pass1", "pass2")
    assert hide_values("abcdefgh abcdef /root pass1 pass2 xy", values) == f"{MASK} {MASK} /root {MASK} {MASK} xy"


@given(st.lists(st.text(max_size=10), max_size=6))
def test_words_stay_words(words: list[str]) -> None:
    shown = mask_words(words)
    assert len(shown) == len(words)
    assert mask_words(shown) == shown
    assert shlex.split(shlex.join(shown)) == shown


@given(st.text("abc123!$%&=?-_", min_size=4, max_size=20), st.sampled_from(SECRET[:-1]), st.booleans())
def test_a_secret_never_comes_through(secret: str, name: str, is_one_word: bool) -> None:
    secret = f"S{secret}"
    words = [f"{name}={secret}"] if is_one_word else [name, secret]
    assert secret not in " ".join(mask_words(["train.py", *words, "--lr", "1"]))


def test_text_without_an_address_is_left_alone() -> None:
    assert mask_url("user:pw@host") == "user:pw@host"
