"""Which certificates make a host known, and which algorithms lists of ssh_config leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import SSHCertificateType
from ssh_certificates import SshAuthority, blob_of
from ssh_net import make_key

from msrun.launch.transport.ssh.client_config import AUTHORITY_SIGNATURES, choose_algorithms
from msrun.launch.transport.ssh.known_hosts import BadCertificate, HostKey, HostKeyCheck, check_certificate
from msrun.launch.transport.ssh.paramiko_names import Transport
from msrun.launch.transport.ssh.target import SshFault, SshTarget


@pytest.fixture
def public(tmp_path: Path) -> str:
    return make_key(tmp_path / "host_key")


AUTHORITIES = {
    "ed25519": lambda: None,
    "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
}


@pytest.mark.parametrize("kind", AUTHORITIES)
def test_certificate_of_any_kind_of_authority_is_read(kind: str, public: str) -> None:
    line = SshAuthority(AUTHORITIES[kind]()).sign(public, "h1", "*.dc")
    for name in ("h1", "h7.dc"):
        check_certificate(line.split()[0], blob_of(line), blob_of(public), [name], AUTHORITY_SIGNATURES)
    with pytest.raises(BadCertificate, match="it is for h1"):
        check_certificate(line.split()[0], blob_of(line), blob_of(public), ["h2"], AUTHORITY_SIGNATURES)


@pytest.mark.parametrize(
    ("names", "changes", "reason"),
    [
        (("h2",), {}, "it is for h2"),
        ((), {}, "it is for no host by name"),
        (("h1",), {"begin_s": 60}, "not valid now"),
        (("h1",), {"begin_s": -60, "end_s": -1}, "not valid now"),
        (("h1",), {"kind": SSHCertificateType.USER}, "a user's"),
        (("h1",), {"option": b"force-command"}, "critical options"),
    ],
)
def test_certificate_that_is_not_for_this_host_now_does_not_count(
    names: tuple[str, ...], changes: dict[str, Any], reason: str, public: str
) -> None:
    line = SshAuthority().sign(public, *names, **changes)
    with pytest.raises(BadCertificate, match=reason):
        check_certificate(line.split()[0], blob_of(line), blob_of(public), ["h1"], AUTHORITY_SIGNATURES)


def test_certificate_that_was_changed_or_is_of_another_key_does_not_count(public: str, tmp_path: Path) -> None:
    line = SshAuthority().sign(public, "h1")
    kind, blob = line.split()[0], blob_of(line)
    with pytest.raises(BadCertificate, match="of another key"):
        check_certificate(kind, blob, blob_of(make_key(tmp_path / "other")), ["h1"], AUTHORITY_SIGNATURES)
    with pytest.raises(BadCertificate, match="signature is wrong"):
        check_certificate(kind, blob[:-1] + bytes([blob[-1] ^ 1]), blob_of(public), ["h1"], AUTHORITY_SIGNATURES)
    for end in range(0, len(blob), 7):
        with pytest.raises(BadCertificate):
            check_certificate(kind, blob[:end], blob_of(public), ["h1"], AUTHORITY_SIGNATURES)
    with pytest.raises(BadCertificate, match="signed it with ssh-ed25519"):
        check_certificate(kind, blob, blob_of(public), ["h1"], ("rsa-sha2-512",))


def verdict(folder: Path, lines: str, public: str, shown: str, **changes: Any) -> str:
    path = folder / "known_hosts"
    path.write_text(lines)
    target = SshTarget(name="h1", host_name="h1", user="me", known_hosts_files=(path,), host_key_name="h1", **changes)
    check = HostKeyCheck(lambda _: None)
    certificate = HostKey(shown.split()[0], blob_of(shown)) if shown else None
    try:
        check.check(target, HostKey("ssh-ed25519", blob_of(public)), certificate)
    except SshFault as fault:
        return fault.text
    return "passes"


def test_authority_of_known_hosts_makes_a_host_known(public: str, tmp_path: Path) -> None:
    good, other = SshAuthority(), SshAuthority()
    line = f"@cert-authority *,!h9 {good.public}\n"
    assert verdict(tmp_path, line, public, good.sign(public, "h1")) == "passes"
    assert "another authority" in verdict(tmp_path, line, public, other.sign(public, "h1"))
    assert "it is for h2" in verdict(tmp_path, line, public, good.sign(public, "h2"))
    assert "it has no certificate" in verdict(tmp_path, line, public, "")
    assert "is unknown" in verdict(tmp_path, f"@cert-authority g* {good.public}\n", public, good.sign(public, "h1"))
    assert "is unknown" in verdict(tmp_path, f"h1 {good.public}\n".replace("h1", "g1"), public, "")
    plain = f"{line}h1 {public}\n"
    assert verdict(tmp_path, plain, public, other.sign(public, "h1")) == "passes", "its own key is known"
    assert "HAS CHANGED" in verdict(tmp_path, f"h1 {good.public}\n", public, good.sign(public, "h1")), "no host's key"
    revoked = f"@revoked * {good.public}\n{line}"
    assert "is revoked" in verdict(tmp_path, revoked, public, good.sign(public, "h1"))
    assert "is revoked" in verdict(tmp_path, f"@revoked * {public}\n{line}", public, good.sign(public, "h1"))


def test_revoked_host_keys_are_refused(public: str, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    authority = SshAuthority()
    known = f"h1 {public}\n"
    for text, expected in (
        (f"# old ones\n\n{public}\n", "is revoked"),
        (f"{authority.public}\n", "passes"),
        ("no key\n", "line 1 is no public key"),
        ("SSHKRL\n\0", "is a KRL, which msrun cannot read"),
    ):
        revoked.write_text(text)
        assert expected in verdict(tmp_path, known, public, "", revoked_host_keys=revoked)
    revoked.write_text(authority.public)
    signed = authority.sign(public, "h1")
    line = f"@cert-authority * {authority.public}\n"
    assert "is revoked" in verdict(tmp_path, line, public, signed, revoked_host_keys=revoked)
    missing = tmp_path / "none"
    assert "cannot be read" in verdict(tmp_path, known, public, "", revoked_host_keys=missing)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("c", ("c",)),
        ("c,a", ("c", "a")),
        ("x,c,y", ("c",)),
        ("x", ()),
        ("+d", ("a", "b", "c", "d")),
        ("+a", ("a", "b", "c")),
        ("-b", ("a", "c")),
        ("-*", ()),
        ("^c,d", ("c", "d", "a", "b")),
        ("*", ("a", "b", "c", "d")),
        ("", ()),
    ],
)
def test_list_of_algorithms_means_what_it_means_to_ssh(given: str, left: tuple[str, ...]) -> None:
    assert choose_algorithms(given, ("a", "b", "c"), ("c", "d")) == left


def test_every_list_is_offered_and_one_that_leaves_nothing_is_an_error() -> None:
    class Silent:
        def settimeout(self, _: float) -> None:
            """Be no socket."""

        def close(self) -> None:
            """Nor that."""

    transport = Transport(Silent())
    lists = {"ciphers": "aes256-gcm@openssh.com", "macs": "hmac-sha2-512", "kexalgorithms": "curve25519-sha256"}
    transport.use_algorithms({**lists, "hostkeyalgorithms": "rsa-*", "pubkeyacceptedalgorithms": "-rsa-sha2-256"})
    offered = transport.get_security_options()
    assert (offered.ciphers, offered.digests) == (("aes256-gcm@openssh.com",), ("hmac-sha2-512",))
    assert offered.kex == ("curve25519-sha256@libssh.org",)
    assert all(name.startswith("rsa-") for name in offered.key_types)
    assert "rsa-sha2-256" not in transport._preferred_pubkeys and "rsa-sha2-512" in transport._preferred_pubkeys
    with pytest.raises(ValueError, match="Ciphers aes999: leaves none"):
        transport.use_algorithms({"ciphers": "aes999"})
