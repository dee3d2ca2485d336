"""Unknown keys and options: named with the near one, in our manifests and in others'."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launch_templates import BadFile, BadValue, Finding, lint_texts, list_kinds, load_kind, render_manifest
from launch_templates.cli import main
from launch_templates.msrun_options import FLAGS, NAMES, VALUE_MAY_BE_LEFT_OUT, read_options
from msrun.cli.options import GROUPS, OPTIONAL_VALUES

MANIFESTS = [kind for kind in list_kinds() if load_kind(kind).is_manifest and kind != "ascendjob"]
VALUES: dict[str, Any] = {"name": "train", "image": "r.example/t:1", "nodes": 2, "local_worker_num": 4}


def text_of(template: str, *script: str) -> str:
    return render_manifest(template, {**VALUES, "device_target": "GPU"}, script or ("train.py",))


def unknown(text: str) -> list[Finding]:
    return [finding for finding in lint_texts([("f.yaml", text)]) if finding.rule_id == "unknown-key"]


@pytest.mark.parametrize("template", MANIFESTS)
def test_our_manifests_have_known_keys_alone(template: str) -> None:
    assert unknown(text_of(template)) == []


@pytest.mark.parametrize("template", MANIFESTS)
@pytest.mark.parametrize(
    ("key", "wrong"),
    [("restartPolicy", "restartPolcy"), ("containers", "container"), ("limits", "limit"), ("metadata", "metadta")],
)
def test_a_misspelt_key_is_named_with_the_one_that_is_meant(template: str, key: str, wrong: str) -> None:
    findings = unknown(text_of(template).replace(f"{key}:", f"{wrong}:"))
    assert findings
    for finding in findings:
        assert finding.severity == "error"
        assert f"{wrong!r} is no key of" in finding.message
        assert finding.remedy == f"did you mean {key!r}?"


def test_keys_that_the_user_chooses_are_left_alone() -> None:
    body = yaml.safe_load(text_of("indexed-job").split("---")[-1])
    body["metadata"]["annotations"] = {"anything": "goes"}
    body["spec"]["template"]["spec"]["nodeSelector"] = {"zone": "a"}
    assert unknown(yaml.safe_dump(body)) == []
    assert unknown("apiVersion: example.com/v1\nkind: Other\nanything: [{goes: 1}]\n") == []


def test_options_are_those_of_the_command() -> None:
    options = {option.opts[0].removeprefix("--") for group in GROUPS.values() for option in group}
    options = {name for name in options if not name.startswith("-")}
    assert options | FLAGS == NAMES
    assert {name.removeprefix("--") for name in OPTIONAL_VALUES} == VALUE_MAY_BE_LEFT_OUT


def test_options_end_where_msrun_lets_them_end() -> None:
    line = read_options(["--worker-num", "4", "--join", "--grace=2", "x.py", "--node_rank", "0"])
    assert line.options == {"worker_num": "4", "join": "", "grace": "2"}
    assert line.words == {"worker_num": "--worker-num", "join": "--join", "grace": "--grace"}
    assert line.rest == ["x.py", "--node_rank", "0"]
    assert read_options(["--", "--join", "x.py"]).rest == ["--", "--join", "x.py"]
    assert read_options(["--worker_num"]).options == {"worker_num": ""}


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (("--bind_core", "true", "--node_rank", "0", "x.py"), "write --bind_core=true"),
        (("--bind_core=true", "--node-rank", "0", "x.py"), "without --node_rank, which the manifest gives itself"),
        (("--bind_coer=true", "x.py"), "did you mean --bind_core?"),
        (("--zzz", "x.py"), "see msrun --help"),
    ],
)
def test_options_before_the_script_are_read_as_msrun_reads_them(script: tuple[str, ...], match: str) -> None:
    with pytest.raises(BadValue, match=match.replace("?", r"\?")):
        text_of("jobset", *script)
    assert "--bind_core=true" in text_of("jobset", "--bind_core=true", "--grace", "5", "x.py")


def test_lint_names_an_option_that_msrun_does_not_have() -> None:
    text = text_of("jobset").replace("--node_rank=", "--node-rnk=")
    [finding] = [one for one in lint_texts([("f.yaml", text)]) if one.rule_id == "msrun-option"]
    assert (finding.message, finding.remedy) == ("--node-rnk is no option of msrun", "did you mean --node_rank?")


@pytest.mark.parametrize("kind", ["RayCluster", "TFJob"])
def test_job_of_a_kind_that_is_not_checked_is_told_by_name(kind: str) -> None:
    text = f"apiVersion: x/v1\nkind: {kind}\nmetadata: {{name: a}}\n"
    [finding] = lint_texts([("f.yaml", text)])
    assert (finding.rule_id, finding.severity, finding.message) == ("not-read", "warning", f"a {kind} is not checked")
    ids = {one.rule_id for one in lint_texts([("f.yaml", f"{text_of('jobset')}---\n{text}")])}
    assert ids == {"not-read"}


def test_lists_that_contain_each_other_are_refused_on_one_line() -> None:
    with pytest.raises(BadFile, match=r"line 1: \*a contains itself; write it out"):
        lint_texts([("f.yaml", "&a {kind: List, items: [{kind: List, items: [*a]}]}")])


def test_render_fails_when_its_manifest_has_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch_templates import render

    real = render.render_manifest
    monkeypatch.setattr(render, "render_manifest", lambda *given: real(*given).replace("Never", "OnFailure"))
    words = [word for name, value in VALUES.items() for word in ("--set", f"{name}={value}")]
    with pytest.raises(SystemExit) as ended:
        main(["render", "jobset", *words, "--set", "cpu=1", "--", "x.py"])
    assert ended.value.code == 1
    assert "error restart-policy" in capsys.readouterr().err
