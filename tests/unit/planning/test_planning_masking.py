"""Which words of a command line are secrets, and that no more than those are hidden."""

import re
import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from msrun.planning.masking import MASK, hide_values, is_secret_name, mask_url, mask_words, secret_values


def words_of(text):
    return text.split()


SECRET = words_of("""
    --api_key --api-key --apikey --apiKey --key --token --hf_token --accessToken --wandb.api_key --password
    --dbpassword --PASSWD --secret --client_secret_value --credentials AWS_SECRET_ACCESS_KEY
""")
PLAIN = words_of("""
    --keyboard --num_keys --keys --key_dim --num_key_value_heads --monkey --tokenizer --tokens --max_tokens
    --pad_token_id --tokenizer_name --lr --pass
""")


@pytest.mark.parametrize("name", SECRET)
def test_value_of_a_secret_name_is_hidden_in_both_forms(name):
    assert is_secret_name(name)
    assert mask_words([f"{name}=hunter2", "x"]) == [f"{name}={MASK}", "x"]
    if name.startswith("--"):
        assert mask_words(["a.py", name, "hunter2", "x"]) == ["a.py", name, MASK, "x"]


@pytest.mark.parametrize("name", PLAIN)
def test_everyday_words_of_training_are_not_hidden(name):
    assert not is_secret_name(name)
    assert mask_words([f"{name}=64", name, "64"]) == [f"{name}=64", name, "64"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--token --verbose x", "--token --verbose x"),
        ("--token -x1", f"--token {MASK}"),
        ("--token --token a", f"--token --token {MASK}"),
        ("--token a b", f"--token {MASK} b"),
        ("token a", "token a"),
        ("--set api_key=a=b --set=api_key=c", f"--set api_key={MASK} --set=api_key={MASK}"),
        ("+trainer.api_key=a", f"+trainer.api_key={MASK}"),
        ("https://u:p@host/x", f"https://u:{MASK}@host/x"),
        ("redis://:p@h,redis://:q@h", f"redis://:{MASK}@h,redis://:{MASK}@h"),
        ("https://host:80/a@b git@host:a", "https://host:80/a@b git@host:a"),
    ],
)
def test_words_are_shown_as(words, shown):
    assert mask_words(words.split(" ")) == shown.split(" ")


def test_values_are_found_for_hiding_them_elsewhere():
    words = ["--token", "abcdef", "--api_key=xy", "--lr", "0.1", "http://u:pass1@h"]
    values = secret_values(words, {"API_KEY": "abcdefgh", "HOME": "/root", "URL": "http://u:pass2@h"})
    assert values == ("abcdefgh", "abcdef", "pass1", "pass2")
    assert hide_values("abcdefgh abcdef /root pass1 pass2 xy", values) == f"{MASK} {MASK} /root {MASK} {MASK} xy"


@given(st.lists(st.text(max_size=10), max_size=6))
def test_words_stay_words(words):
    shown = mask_words(words)
    assert len(shown) == len(words)
    assert mask_words(shown) == shown
    assert shlex.split(shlex.join(shown)) == shown


ADDRESS_WITH_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*):([^/\s@]+)@")
"""What is hidden in an address, in the plainest words; its time grows with the square of the text."""
ASSIGNMENT = re.compile(r"([-+]*[A-Za-z_][\w.-]*)=(.*)\Z", re.DOTALL)


def mask_word(word):
    match = ASSIGNMENT.match(word)
    if match is None:
        passwords = [password for _, password in ADDRESS_WITH_PASSWORD.findall(word)]
        return ADDRESS_WITH_PASSWORD.sub(rf"\1:{MASK}@", word), passwords
    name, value = match.groups()
    shown, secrets = (MASK, [value]) if value and is_secret_name(name) else mask_word(value)
    return f"{name}={shown}", secrets


@given(
    st.lists(st.sampled_from(["a", "Z", "9", "+", "-", "://", ":", "/", "@", " ", "=", "key", "_", "."])).map("".join)
)
@example("9+a://u:pw@9://u:pw@h a://b://c:pw@d://:pw@")
def test_fast_patterns_hide_what_the_plain_ones_do(word):
    shown, secrets = mask_word(word)
    assert mask_words([word]) == [shown]
    assert set(secret_values([word], {})) == {secret for secret in secrets if len(secret) >= 4}
    assert mask_url(word) == ADDRESS_WITH_PASSWORD.sub(rf"\1:{MASK}@", word)
    passwords = {password for _, password in ADDRESS_WITH_PASSWORD.findall(word) if len(password) >= 4}
    assert set(secret_values([], {"URL": word})) == passwords


@pytest.mark.parametrize(
    "piece", ["A", "a=", "a://", "a://b:", "a:", "a://b:c@", "9", "-", "--a=", "a=-", "@", "a://b:c ", "key", "aB", "_"]
)
def test_the_longest_word_that_a_command_line_takes_is_masked_by_few_steps(piece):
    """A square of it would be 10,000,000,000 steps: a test that does not end."""
    word = piece * (100_000 // len(piece))
    secret_values([word], {"URL": word})
    mask_words([word, f"x://{word}", f"a={word}", f"--token={word}"])
