"""Which host keys are let pass, under each policy; new ones are written once, by any number of writers."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from msrun.launch.transport.ssh.known_hosts import HostKey, HostKeyCheck, KnownHosts, hash_name, parse_known_hosts
from msrun.launch.transport.ssh.target import SshFault, SshTarget
from msrun.planning.spec import HostKeyPolicy

# ssh-ed25519 keys of 32 equal bytes
KEY_A = "AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB"
KEY_B = "AAAAC3NzaC1lZDI1NTE5AAAAIAICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIC"


def key(text: str, kind: str = "ssh-ed25519") -> HostKey:
    (known,) = parse_known_hosts(f"x {kind} {text}", Path("x"))
    return known.key


def target(path: Path, policy: HostKeyPolicy = "strict", port: int = 22, *, is_hashed: bool = False) -> SshTarget:
    return SshTarget(
        name="h1",
        host_name="h1",
        user="me",
        port=port,
        known_hosts_files=(path,),
        host_key_name="h1" if port == 22 else f"[h1]:{port}",
        plain_host_key_name="" if port == 22 else "h1",
        host_keys=policy,
        hash_known_hosts=is_hashed,
    )


def verdict(text: str, path: Path, policy: HostKeyPolicy = "strict", port: int = 22, offered: str = KEY_A) -> str:
    path.write_text(text)
    try:
        HostKeyCheck(lambda _: None).check(target(path, policy, port), key(offered))
    except SshFault as fault:
        return fault.text
    return "passes"


@pytest.mark.parametrize(
    "line",
    [
        f"h1 ssh-ed25519 {KEY_A}",
        f"g1,H1,10.0.0.1 ssh-ed25519 {KEY_A} comment",
        f"h? ssh-ed25519 {KEY_A}",
        f"*,!h2 ssh-ed25519 {KEY_A}",
        f"{hash_name('h1')} ssh-ed25519 {KEY_A}",
        f"h1 ssh-ed25519 {KEY_B}\nh1 ssh-ed25519 {KEY_A}",
        f"# comment\n\nbroken line\n@cert-authority * ssh-ed25519 {KEY_B}\nh1\tssh-ed25519\t{KEY_A}",
        f"@revoked h1 ssh-ed25519 {KEY_B}\nh1 ssh-ed25519 {KEY_A}",
    ],
)
def test_known_key_passes_under_every_policy(tmp_path: Path, line: str) -> None:
    for policy in ("strict", "accept-new", "off"):
        assert verdict(line, tmp_path / "known_hosts", policy) == "passes"
        assert (tmp_path / "known_hosts").read_text() == line


@pytest.mark.parametrize(
    "line",
    ["", f"h2 ssh-ed25519 {KEY_A}", f"*,!h1 ssh-ed25519 {KEY_A}", f"[h1]:2222 ssh-ed25519 {KEY_A}", "h1 ssh-ed25519 ?"],
)
def test_unknown_host_is_refused_by_default_with_its_fingerprint(tmp_path: Path, line: str) -> None:
    text = verdict(line, tmp_path / "known_hosts")
    assert f"host key {key(KEY_A).fingerprint} is unknown: h1 is not in {tmp_path}/known_hosts" in text
    assert "--ssh_host_keys accept-new" in text


def test_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text(f"ssh-ed25519 {KEY_A}\n")
    shown = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key.pub"], capture_output=True, text=True, check=True)
    assert key(KEY_A).fingerprint.removeprefix("ED25519 ") in shown.stdout


def test_key_with_a_port_is_found_under_both_names_and_another_of_the_plain_name_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    assert verdict(f"[h1]:2222 ssh-ed25519 {KEY_A}", path, port=2222) == "passes"
    assert verdict(f"h1 ssh-ed25519 {KEY_A}", path, port=2222) == "passes"
    assert "is unknown: [h1]:2222 is not in" in verdict(f"h1 ssh-ed25519 {KEY_B}", path, port=2222)
    assert verdict(f"h1 ssh-ed25519 {KEY_B}", path, "accept-new", port=2222) == "passes"
    assert path.read_text().endswith(f"\n[h1]:2222 ssh-ed25519 {KEY_A}\n")


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_changed_key_is_refused_with_both_fingerprints_and_the_remedy(tmp_path: Path, policy: HostKeyPolicy) -> None:
    path = tmp_path / "known_hosts"
    text = verdict(f"\nh1 ssh-ed25519 {KEY_B}\n", path, policy)
    assert text.startswith("HOST KEY HAS CHANGED")
    assert f"it is {key(KEY_A).fingerprint}, but {path}:2 has {key(KEY_B).fingerprint}" in text
    assert text.endswith(f"ssh-keygen -f {path} -R h1")


def test_key_of_another_kind_is_a_changed_key_too(tmp_path: Path) -> None:
    rsa = "AAAAB3NzaC1yc2EAAAADAQABAAAAAQE="
    assert "HAS CHANGED" in verdict(f"h1 ssh-rsa {rsa}", tmp_path / "known_hosts", "accept-new")


@pytest.mark.parametrize("policy", ["strict", "accept-new", "off"])
def test_revoked_key_never_passes(tmp_path: Path, policy: HostKeyPolicy) -> None:
    text = f"@revoked * ssh-ed25519 {KEY_A}\nh1 ssh-ed25519 {KEY_A}\n"
    assert "is revoked" in verdict(text, tmp_path / "known_hosts", policy)


def test_policy_off_warns_once_and_of_every_changed_key(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"h1 ssh-ed25519 {KEY_B}\n")
    said: list[str] = []
    check = HostKeyCheck(said.append)
    check.check(target(path, "off"), key(KEY_A))
    check.check(target(path, "off", 2222), key(KEY_A))
    assert ["not checked" in line for line in said] == [True, False]
    assert said[1].startswith("h1: HOST KEY HAS CHANGED")
    assert path.read_text() == f"h1 ssh-ed25519 {KEY_B}\n"


@pytest.mark.parametrize("is_hashed", [False, True])
def test_new_host_is_written_once_by_any_number_of_launchers(tmp_path: Path, is_hashed: bool) -> None:
    path = tmp_path / "new" / "known_hosts"
    checks = [HostKeyCheck(lambda _: None) for _ in range(8)]
    wanted = target(path, "accept-new", is_hashed=is_hashed)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda check: check.check(wanted, key(KEY_A)), checks))
    (line,) = path.read_text().splitlines()
    assert line.endswith(f" ssh-ed25519 {KEY_A}") and line.startswith("|1|" if is_hashed else "h1 ")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SshFault, match="HAS CHANGED"):
        checks[0].check(wanted, key(KEY_B))
    assert KnownHosts([path]).find("h1")


def test_last_line_without_an_end_is_not_written_into(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    assert verdict(f"h2 ssh-ed25519 {KEY_B}", path, "accept-new") == "passes"
    assert path.read_text() == f"h2 ssh-ed25519 {KEY_B}\nh1 ssh-ed25519 {KEY_A}\n"


def test_server_is_asked_for_the_kinds_of_key_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"h1 ssh-rsa {KEY_A}\n@revoked h1 ssh-dss {KEY_A}\nh2 ecdsa-sha2-nistp256 {KEY_A}\n")
    assert HostKeyCheck(lambda _: None).known_kinds(target(path)) == ["ssh-rsa"]


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SshFault, match=f"{tmp_path}: cannot be read \\(Is a directory\\)"):
        HostKeyCheck(lambda _: None).known_kinds(target(tmp_path))
