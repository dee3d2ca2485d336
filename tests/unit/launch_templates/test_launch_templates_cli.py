"""The command launch-template, run in this process."""

import importlib.metadata
import io
import subprocess
import sys

import pytest
import yaml

import launch_templates
from launch_templates.cli import cli, main

REQUIRED = ["--set", "name=train", "--set", "image=r.example/t:1"]


class Run:
    """Exit status and output of one command."""

    def __init__(self, capsys, *argv):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        self.code = caught.value.code
        self.out, self.err = capsys.readouterr()


def test_version_without_an_installation_is_said_to_be_unknown(capsys, monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    run = Run(capsys, "--version")
    assert (run.code, run.err) == (0, "")
    assert run.out == "launch-template, version unknown: msrun is not installed, only on Python's path\n"


def test_list_names_every_kind_with_a_summary(capsys):
    run = Run(capsys, "list")
    assert run.code == 0
    assert [line.split()[0] for line in run.out.splitlines()] == launch_templates.list_kinds()
    assert all(len(line.split()) > 3 for line in run.out.splitlines())


@pytest.mark.parametrize("name", launch_templates.list_kinds())
def test_explain_tells_ranks_settings_and_defaults(name, capsys):
    run = Run(capsys, "explain", name)
    assert run.code == 0
    assert "Ranks:" in run.out
    [line] = [line for line in run.out.splitlines() if line.startswith("local_worker_num ")]
    assert line.split()[:3] == ["local_worker_num", "int", "8"]


def test_render_writes_to_stdout_and_lint_accepts_it_from_stdin(capsys, monkeypatch):
    run = Run(capsys, "render", "jobset", *REQUIRED, "--", "train.py", "--lr", "0.1", "", "--", "-o", "é")
    assert (run.code, run.err) == (0, "")
    *_, document = yaml.safe_load_all(run.out)
    args = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[8:] == ["train.py", "--lr", "0.1", "", "--", "-o", "é"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(run.out.encode())))
    assert Run(capsys, "lint", "-").code == 0


def test_settings_go_over_values_files_and_tables_are_merged(capsys, tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text("nodes: 4\ncpu: 1.5\nscript: [a.py]\nenv:\n  A: from file\n  B: from file\n", encoding="utf-8")
    output = tmp_path / "job.yaml"
    options = ["--values", str(values), "--set", "master-port=9000", "--set", "env.B=from=set", "-o", str(output)]
    run = Run(capsys, "render", "indexed-job", *REQUIRED, *options)
    assert (run.code, run.out, run.err) == (0, "", "")
    *_, job = yaml.safe_load_all(output.read_text(encoding="utf-8"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completions"] == 4
    assert container["resources"]["limits"]["cpu"] == "1.5"
    assert "--master_port=9000" in container["args"]
    assert {item["name"]: item["value"] for item in container["env"]} == {
        "PYTHONUNBUFFERED": "1",
        "A": "from file",
        "B": "from=set",
    }


def test_findings_go_to_stdout_and_an_error_exits_with_1(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    Run(capsys, "render", "volcano", *REQUIRED, "-o", str(path), "--", "train.py")
    broken = path.read_text(encoding="utf-8").replace("--worker_num=16", "--worker_num=9")
    path.write_text(broken, encoding="utf-8")
    run = Run(capsys, "lint", str(path))
    assert run.code == 1
    assert run.out.startswith(f"{path}: Job/train spec.tasks[0].template.spec.containers[0].args: error world-size: ")
    assert run.err == "launch-template: 1 errors, 0 warnings\n"
    assert Run(capsys, "lint", "--ignore=world-size", str(path)).code == 0


HOST_NETWORK = """
kind: JobSet
spec:
  replicatedJobs:
    - name: node
      template: {spec: {template: {spec: {hostNetwork: true, dnsPolicy: ClusterFirstWithHostNet}}}}
"""


def test_warnings_alone_exit_with_0_and_can_be_left_out(capsys, tmp_path):
    path, patch = tmp_path / "job.yaml", tmp_path / "patch.yaml"
    patch.write_text(HOST_NETWORK)
    words = ["render", "jobset", *REQUIRED, "--patch", str(patch), "-o", str(path)]
    run = Run(capsys, *words, "--", "t.py")
    assert run.code == 0 and "warning host-network" in run.err
    run = Run(capsys, "lint", str(path))
    assert run.code == 0 and "warning host-network" in run.out
    run = Run(capsys, "lint", "--ignore", "host-network", str(path))
    assert (run.code, run.out, run.err) == (0, "", "")
    assert Run(capsys, *words, "--ignore", "host-network", "--", "t.py").err == ""


def test_definitions_of_a_cluster_go_over_those_of_the_package(capsys, tmp_path):
    path, crd = tmp_path / "job.yaml", tmp_path / "crd.yaml"
    Run(capsys, "render", "jobset", *REQUIRED, "-o", str(path), "--", "t.py")
    schema = {"type": "object", "properties": {"kind": {}, "apiVersion": {}, "metadata": {"type": "object"}}}
    version = {"name": "v1alpha2", "schema": {"openAPIV3Schema": schema}}
    spec = {"group": "jobset.x-k8s.io", "names": {"kind": "JobSet"}, "versions": [version]}
    crd.write_text(yaml.safe_dump({"kind": "CustomResourceDefinition", "spec": spec}))
    run = Run(capsys, "lint", "--crd", str(crd), str(path))
    assert run.code == 1 and "error unknown-key: 'spec' is no key of JobSet" in run.out


def test_lint_without_jsonschema_says_what_it_does_not_check(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    path = tmp_path / "job.yaml"
    run = Run(capsys, "render", "jobset", *REQUIRED, "-o", str(path), "--", "t.py")
    assert (run.code, run.err) == (0, "")
    run = Run(capsys, "lint", str(path))
    assert run.code == 0 and "warning no-schemas" in run.out and "pip install 'msrun[templates]'" in run.out


def test_schemas_are_listed_with_their_source(capsys):
    words = [line.split() for line in Run(capsys, "schemas").out.splitlines()]
    assert ["batch/v1", "Job", "kubernetes/kubernetes@v1.37.0", "(kubernetes-validate)"] in words
    assert all("@" in line[2] for line in words)


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        ([], ["Missing command"]),
        (["explain", "jobsets"], ["'jobsets'", "did you mean 'jobset'"]),
        (["render", "jobset"], ["'name', 'image', 'script'", "-- SCRIPT ARGS"]),
        (["render", "jobset", *REQUIRED, "t.py", "--lr", "1"], ["'--lr'", "after --"]),
        (["render", "jobset", *REQUIRED, "--set", "nodes", "--", "t.py"], ["'nodes'", "KEY=VALUE"]),
        (
            ["render", "jobset", *REQUIRED, "--set", "nodes=x", "--", "t.py"],
            ["nodes='x'", "integer of at least 1|from 1"],
        ),
        (["render", "jobset", *REQUIRED, "--set", "nodes.a=1", "--", "t.py"], ["nodes={'a': '1'}: must be an integer"]),
        (
            ["render", "jobset", *REQUIRED, "--set", "script=t.py"],
            ["script='t.py': must be a list of one or more texts"],
        ),
        (["render", "jobset", *REQUIRED, "--set", "nodez=1", "--", "t.py"], ["did you mean 'nodes'"]),
        (["render", "jobset", *REQUIRED, "--values", "/nowhere.yaml", "--", "t.py"], ["/nowhere.yaml: cannot be read"]),
        (["render", "jobset", *REQUIRED, "-o", "/nowhere/a.yaml", "--", "t.py"], ["cannot be written"]),
        (["lint", "/nowhere.yaml"], ["/nowhere.yaml: cannot be read: No such file"]),
        (
            ["lint", "--ignore=host-netwrk", "/nowhere.yaml"],
            ["'host-netwrk'; did you mean 'host-network'?|cannot be read"],
        ),
        (["lint", "/"], ["/: cannot be read: Is a directory"]),
    ],
)
def test_wrong_input_is_one_line_on_stderr_and_exits_with_2(argv, texts, capsys):
    run = Run(capsys, *argv)
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("launch-template: error: ")
    assert run.err.count("\n") == 1
    for text in texts:
        assert any(part in run.err for part in text.split("|")), run.err


@pytest.mark.parametrize(
    "content", [b"a: [", b"- a", b"1: 2", b"a: 1\na: 1", b"\xff", b"[" * 5000, b"nodes: {}", b"env: 3"]
)
def test_broken_values_files_are_refused_without_a_traceback(content, capsys, tmp_path):
    path = tmp_path / "values.yaml"
    path.write_bytes(content)
    run = Run(capsys, "render", "jobset", *REQUIRED, "--values", str(path), "--", "t.py")
    assert run.code == 2
    assert run.err.count("\n") == 1


def test_help_of_every_command_exits_with_0(capsys):
    for argv in ([], *([name] for name in cli.commands)):
        run = Run(capsys, *argv, "--help")
        assert (run.code, run.err) == (0, "")
        assert "Usage: launch-template" in run.out


@pytest.mark.parametrize(
    ("words", "more"),
    [("--help", ["yaml"]), ("render jobset --set name=a --set image=t:1 -- x.py", []), ("explain slurm", [])],
)
def test_commands_load_neither_torch_nor_msrun(words, more):
    code = (
        f"import sys\nfrom launch_templates.cli import main\ntry: main({words.split()})\nexcept SystemExit: pass\n"
        f"sys.exit(any(name in sys.modules for name in ('torch', 'msrun', 'numpy', *{more})))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60).returncode == 0


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m launch_templates explain jobset | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "0\n"
    assert done.stderr == ""
