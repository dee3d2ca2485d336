"""What the command line says of SSH, and what of it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from msrun.cli import command
from msrun.cli.build_spec import build_spec
from msrun.cli.sources import Sources, apply_sources
from msrun.cli.words import normalise
from msrun.planning.record_json import decode_record, encode_record
from msrun.planning.spec import SshSettings


@pytest.mark.parametrize(
    "settings", [SshSettings(), SshSettings(Path("/c"), "me", 22, (Path("/a"), Path("/b")), "accept-new", 1.5, 1024)]
)
def test_settings_survive_json(settings: SshSettings) -> None:
    assert decode_record(SshSettings, json.loads(json.dumps(encode_record(settings)))) == settings


def settings_of(*words: str) -> SshSettings:
    with command.make_context("msrun", normalise([*words, "true"]), obj=Sources()) as context:
        return build_spec(apply_sources(context, context.params), dict(os.environ)).ssh


def test_options_variables_and_file_become_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text("ssh_identity: [a, /b]\nssh_window: 7\nssh_user: them\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MSRUN_SSH_PORT", "2222")
    assert settings_of() == SshSettings(port=2222)
    words = (
        "--config=job.yaml",
        "--ssh-user=me",
        "--ssh_config=~/c",
        "--ssh_host_keys=off",
        "--ssh_connect_time_out=5",
        "--ssh_client=openssh",
    )
    found = settings_of(*words, "--ssh_connect_time_out=5")
    assert found == SshSettings(Path("/home/me/c"), "me", 2222, (tmp_path / "a", Path("/b")), "off", 5.0, 7, "openssh")
    assert settings_of("--ssh_config=none").config_file == Path("none")
