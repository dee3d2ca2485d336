"""Patches over rendered manifests: strategic merge by name, null deletes, and the lint after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from launch_templates import BadFile, render_manifest
from launch_templates.cli import main
from launch_templates.lint.documents import read_documents

VALUES = {"name": "train", "image": "r.example/t:1"}


def patched(patch: str, kind: str = "indexed-job") -> dict[str, Any]:
    text = render_manifest(kind, VALUES, ["train.py"], read_documents(patch, "patch.yaml"))
    return {body["kind"]: body for body in yaml.safe_load_all(text)}


def pod(bodies: dict[str, Any]) -> dict[str, Any]:
    return bodies["Job"]["spec"]["template"]["spec"]


def test_mappings_merge_null_deletes_and_items_merge_by_name() -> None:
    before = pod(patched(""))
    after = pod(
        patched("""
kind: Job
spec:
  template:
    spec:
      hostNetwork: true
      enableServiceLinks: null
      containers:
        - name: msrun
          imagePullPolicy: Always
          env:
            - {name: PYTHONUNBUFFERED, $patch: delete}
            - {name: NEW, value: "1", valueFrom: null}
          volumeMounts:
            - {mountPath: /logs, subPath: a}
        - {name: side, image: "s:1"}
""")
    )
    assert after["hostNetwork"] is True and "enableServiceLinks" not in after
    main_container, side = after["containers"]
    assert side == {"name": "side", "image": "s:1"}
    assert main_container["imagePullPolicy"] == "Always"
    assert main_container["env"] == [{"name": "NEW", "value": "1"}]
    assert [mount["mountPath"] for mount in main_container["volumeMounts"]] == ["/dev/shm", "/logs"]
    assert main_container["volumeMounts"][1] == {"name": "logs", "mountPath": "/logs", "subPath": "a"}
    kept = {
        key: value for key, value in main_container.items() if key not in ("env", "volumeMounts", "imagePullPolicy")
    }
    assert kept == {key: value for key, value in before["containers"][0].items() if key in kept}


def test_lists_without_names_are_replaced() -> None:
    bodies = patched("kind: NetworkPolicy\nspec: {policyTypes: [Egress]}\n---\nkind: Job\nspec: {suspend: true}\n")
    assert bodies["NetworkPolicy"]["spec"]["policyTypes"] == ["Egress"]
    assert bodies["Job"]["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("patch", "kind"),
    [("kind: Deployment", "indexed-job"), ("kind: Job\nmetadata: {name: other}", "indexed-job"), ("{}", "jobset")],
)
def test_patch_that_fits_no_object_is_refused_with_those_that_there_are(patch: str, kind: str) -> None:
    with pytest.raises(BadFile, match=r"patch.yaml: a patch of .* fits 0 .*give kind .* of one of: .*/train"):
        patched(patch, kind)


def test_patch_that_no_manifest_can_hold_is_refused() -> None:
    with pytest.raises(BadFile, match="holds what is no Kubernetes YAML"):
        patched("kind: Job\nspec: {suspend: 2024-01-01}")


def test_parts_that_a_patch_removes_do_not_trouble_the_next_one() -> None:
    with pytest.raises(BadFile, match="fits 0"):
        patched("kind: Job\nmetadata: null\n---\nkind: Job\nmetadata: {name: train}\n")


def test_scripts_take_no_patch() -> None:
    with pytest.raises(BadFile, match="a slurm is no manifest"):
        patched("kind: Job", "slurm")


def test_what_a_patch_breaks_the_lint_finds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    patch = tmp_path / "patch.yaml"
    patch.write_text("kind: Job\nspec: {backoffLimt: 3, completions: 5}\n")
    words = ["--set", "name=train", "--set", "image=t:1", "--patch", str(patch), "--", "train.py"]
    with pytest.raises(SystemExit) as ended:
        main(["render", "indexed-job", *words])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert "error unknown-key" in said.err and "error completions" in said.err
    assert "completions: 5" in said.out
