"""The file of --tls_config: MindSpore's keys, and a reason for everything that is not taken."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.settings import CIPHERS, PSK_CIPHER, parse_tls_config

DOCUMENTED_CIPHERS = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:"
    "DHE-PSK-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:ECDHE-PSK-CHACHA20-POLY1305:DHE-RSA-AES128-CCM"
)
"""As MindSpore's own example has them, shortened: a stray blank, and suites that MindSpore refuses."""
LEAST = {"client_cert_path": "client.pem", "ca_cert_path": "/etc/ca.crt"}


def parse(values, **environ):
    return parse_tls_config(json.dumps(values), "tls.json", "/conf", environ)


def refusal(values):
    with pytest.raises(UsageError) as caught:
        parse(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_count_from_the_folder_of_the_file():
    spec = parse({**LEAST, "crl_path": "", "server_cert_path": "keys/server.pem"})
    assert (spec.client_cert_path, spec.ca_cert_path, spec.crl_path) == ("/conf/client.pem", "/etc/ca.crt", "")
    assert spec.server_cert_path == "/conf/keys/server.pem"
    assert spec.place("ca_cert_path") == "--tls_config tls.json: ca_cert_path /etc/ca.crt"


def test_without_a_list_all_allowed_suites_are_taken_and_90_days_are_warned():
    spec = parse({**LEAST, "cipher_list": ""})
    assert (spec.ciphers, spec.warning_days) == (CIPHERS, 90)
    assert not any(name.startswith("DHE") or "PSK" in name for name in CIPHERS)


def test_suites_keep_their_order_and_the_one_without_certificates_is_left_out():
    names = f"{CIPHERS[5]}:{PSK_CIPHER}::{CIPHERS[0]}:{CIPHERS[5]}"
    assert parse({**LEAST, "cipher_list": names}).ciphers == (CIPHERS[5], CIPHERS[0])


def test_documented_list_of_suites_is_refused_by_name_with_a_remedy():
    reason = refusal({**LEAST, "cipher_list": DOCUMENTED_CIPHERS})
    assert "'ECDHE-R SA-AES128-GCM-SHA256' (did you mean ECDHE-RSA-AES128-GCM-SHA256?)" in reason
    assert "'DHE-RSA-AES128-GCM-SHA256'" in reason and "and 2 more: not allowed" in reason
    assert "leave cipher_list out to have all that are" in reason and ":".join(CIPHERS) in reason


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "is no JSON object"),
        ({"ca_cert_path": "c"}, "client_cert_path: is missing"),
        ({**LEAST, "crl_paht": "x"}, "'crl_paht': no such key (did you mean crl_path?)"),
        ({**LEAST, "server_password": "x"}, "no password belongs into this file; set MSRUN_TLS_SERVER_PASSWORD"),
        ({**LEAST, "crl_path": 3}, "crl_path: 3 is no text"),
        ({**LEAST, "cert_expire_warning_time_in_day": 6}, "6: must be 7 to 180 days"),
        ({**LEAST, "cert_expire_warning_time_in_day": True}, "true: must be 7 to 180 days"),
        ({**LEAST, "cipher_list": PSK_CIPHER}, "alone cannot be used with certificates"),
        ({**LEAST, "cipher_list": "ALL"}, "'ALL': not allowed"),
    ],
)
def test_what_is_wrong_is_named(values, reason):
    assert reason in refusal(values)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is empty"), ("{\n'a': 1}", "not JSON (line 2:"), ("[" * 100_000, "more than 100 levels deep")],
)
def test_what_is_no_json_is_told(text, reason):
    with pytest.raises(UsageError, match=r"^--tls_config tls.json: ") as caught:
        parse_tls_config(text, "tls.json", "/conf", {})
    assert reason in str(caught.value)


KEYS = (*LEAST, "server_cert_path", "crl_path", "cipher_list", "cert_check_interval_time", "x")
JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.text(max_size=3))


@given(st.dictionaries(st.sampled_from(KEYS), JUNK | st.dictionaries(st.text(), JUNK, max_size=2)))
def test_any_values_are_taken_or_refused_in_one_line(values):
    try:
        parse(values)
    except UsageError as error:
        assert "\n" not in str(error)
