"""The command launch-template, run in this process.
Names, quantities and written YAML of a job, and the plan of an msrun, which becomes a job or is refused.
What goes over a rendered manifest: patches, the Helm chart and the kustomize base, and the lint after it."""

import io
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from cluster_pods import DOMAIN, pods_of
from hypothesis import given
from hypothesis import strategies as st

import launch_templates
from launch_templates import BadFile, lint_texts, names, render_manifest
from launch_templates.cli import cli, main
from launch_templates.lint.documents import read_documents
from launch_templates.names import find_reference
from launch_templates.render import dump_documents
from launch_templates.settings import read_plan
from launch_templates.values import find_quantity, parse_quantity
from msrun import contract
from msrun.planning.host_options import find_host_options
from msrun.planning.schedulers import HostView, find_surroundings

REQUIRED = ["--set", "name=train", "--set", "image=r.example/t:1"]


class Run:
    """Exit status and output of one command."""

    def __init__(self, capsys, *argv):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        self.code = caught.value.code
        self.out, self.err = capsys.readouterr()


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


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m launch_templates explain jobset | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "0\n"
    assert done.stderr == ""


QUANTITIES = "8=8 500m=0.5 1.5=1.5 .5=0.5 2Ki=2048 3M=3000000 1e3=1000 1E=1000000000000000000"


@pytest.mark.parametrize("row", QUANTITIES.split())
def test_quantities_are_read_as_kubernetes_reads_them(row):
    text, _, number = row.partition("=")
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "8GB", "8 Gi", "-1", "Gi", "1..2", "0x1", "\u0663", "1\n"])
def test_other_texts_are_no_quantities(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "number"), [(8, 8), (0.5, Decimal("0.5")), ("1k", 1000), (True, None), (None, None), ([], None)]
)
def test_amounts_of_a_manifest_may_be_numbers(value, number):
    assert find_quantity(value) == number


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (names.LABEL, ["a", "0a", "a-1", "a" * 63], ["-a", "a-", "A", "a.b", "a" * 64, "a\n", ""]),
        (names.SERVICE, ["a", "a-1", "a" * 63], ["0a", "-a", "a" * 64, ""]),
        (
            names.IMAGE,
            ["train", "train:1.0", "localhost:5000/team/train:1", "r.example/t@sha256:" + "0" * 64, "Train"],
            ["r.example/t@sha256:00", "r.example/Train", "a b", "", "https://r.example/t"],
        ),
    ],
    ids=["label", "service", "image"],
)
def test_names_follow_the_rules_of_dns_and_of_images(pattern, fitting, others):
    assert [text for text in [*fitting, *others] if names.fits(pattern, text)] == fitting


def test_variables_that_hold_secrets_are_recognised_by_name():
    secret = ["HF_TOKEN", "db_password", "WANDB_API_KEY"]
    others = ["TOKENIZERS_PARALLELISM", "EOS_TOKEN", "KEYS"]
    assert [name for name in [*secret, *others] if names.is_secret_variable(name)] == secret


@pytest.mark.parametrize(
    ("text", "name"), [("$(A)", "A"), ("${A}", "A"), ("$A", "A"), ("$(A)b", None), ("A", None), ("", None), ("$", None)]
)
def test_references_to_variables_are_recognised(text, name):
    assert find_reference(text) == name


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(blacklist_categories=("Cs",)), max_size=20),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text("abc$: \n", max_size=5), below, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text("abc", min_size=1), trees, min_size=1, max_size=3), min_size=1, max_size=3))
def test_written_yaml_reads_back_as_it_was(documents):
    assert list(yaml.safe_load_all(dump_documents(documents))) == documents


@pytest.fixture
def plan_of(msrun_here, tmp_path, monkeypatch):
    """Gives the plan that msrun prints of a job with these words."""
    monkeypatch.delenv(contract.MSRUN_MINDSPORE_SEMANTICS)
    (tmp_path / "train.py").touch()

    def plan(*words):
        done = msrun_here("--dry_run=json", *words, cwd=tmp_path)
        assert done.code == 0, done.stderr
        return done.stdout.decode()

    return plan


def test_plan_of_several_hosts_gives_nodes_workers_options_and_script(plan_of):
    words = ["--hosts", "h1:2,h2:2,h3:2", "--bind_core", "--env", "A=b", "--max_restarts", "2", "--grace", "30"]
    found = read_plan(plan_of(*words, "train.py", "--lr", "0.1"), "plan.json")
    assert found == {
        "nodes": 3,
        "local_worker_num": 2,
        "max_restarts": 2,
        "grace_s": 30,
        "script": ["--bind_core=true", "--env=A=b", "train.py", "--lr", "0.1"],
    }


def test_plan_of_a_rehearsal_with_a_spare_host_asks_for_that_host_and_for_no_rehearsal(plan_of):
    words = ["--rehearse", "3x2", "--spares", "1", "--min_hosts", "1", "--max_restarts", "2"]
    found = read_plan(plan_of(*words, "train.py"), "plan.json")
    assert (found["nodes"], found["spares"], found["local_worker_num"], found["script"]) == (2, 1, 2, ["train.py"])


def test_plan_of_one_host_and_of_a_module(plan_of):
    found = read_plan(plan_of("--worker_num", "4", "-m", "json.tool", "x"), "plan.json")
    assert found == {"nodes": 1, "local_worker_num": 4, "device_target": "CPU", "script": ["-m", "json.tool", "x"]}


def test_plan_from_a_pipe_is_rendered_and_what_is_set_goes_over_it(capfd, monkeypatch, plan_of):
    plan = plan_of("--hosts", "h1:2,h2:2", "train.py")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plan.encode())))
    words = ["--from", "-", "--set", "name=a", "--set", "image=t:1", "--set", "nodes=5"]
    run = Run(capfd, "render", "jobset", *words)
    assert run.code == 0
    *_, body = yaml.safe_load_all(run.out)
    job = body["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 5
    args = job["template"]["spec"]["containers"][0]["args"]
    assert args[0] == "--worker_num=10" and args[-1] == "train.py"


def test_plan_that_hides_a_secret_is_refused(plan_of):
    plan = plan_of("--worker_num", "1", "--env", "HF_TOKEN=secret", "train.py")
    with pytest.raises(BadFile, match=r"hides a secret in '--env=HF_TOKEN=.*secret_env"):
        read_plan(plan, "plan.json")


def test_hosts_of_different_size_are_refused(plan_of):
    with pytest.raises(BadFile, match="its hosts have 1, 2 of 3 workers; plan a job with as many"):
        read_plan(plan_of("--hosts", "h1:2,h2:1", "train.py"), "plan.json")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"hosts": []}', '{"hosts": [{"workers": [1]}]}', "[" * 9999]
)
def test_other_texts_are_no_plan(content):
    with pytest.raises(BadFile, match="is no plan of msrun; give the output of msrun --dry_run=json"):
        read_plan(content, "plan.json")


VALUES = {"name": "train", "image": "r.example/t:1"}


def patched(patch, kind="indexed-job"):
    text = render_manifest(kind, VALUES, ["train.py"], read_documents(patch, "patch.yaml"))
    return {body["kind"]: body for body in yaml.safe_load_all(text)}


def pod(bodies):
    return bodies["Job"]["spec"]["template"]["spec"]


def test_mappings_merge_null_deletes_and_items_merge_by_name():
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
    changed = {"env", "volumeMounts", "imagePullPolicy"}
    assert all(main_container[key] == value for key, value in before["containers"][0].items() if key not in changed)


def test_lists_without_names_are_replaced():
    bodies = patched("kind: NetworkPolicy\nspec: {policyTypes: [Egress]}\n---\nkind: Job\nspec: {suspend: true}\n")
    assert bodies["NetworkPolicy"]["spec"]["policyTypes"] == ["Egress"]
    assert bodies["Job"]["spec"]["suspend"] is True


FITS_NONE = r"patch.yaml: a patch of .* fits 0 .*give kind .* of one of: .*/train"


@pytest.mark.parametrize(
    ("patch", "kind", "words"),
    [
        ("kind: Deployment", "indexed-job", FITS_NONE),
        ("kind: Job\nmetadata: {name: other}", "indexed-job", FITS_NONE),
        ("{}", "jobset", FITS_NONE),
        ("kind: Job\nspec: {suspend: 2024-01-01}", "indexed-job", "holds what is no Kubernetes YAML"),
        ("kind: Job\nmetadata: null\n---\nkind: Job\nmetadata: {name: train}\n", "indexed-job", "fits 0"),
        ("kind: Job", "slurm", "a slurm is no manifest"),
    ],
)
def test_patch_that_fits_nothing_is_refused_with_what_there_is(patch, kind, words):
    with pytest.raises(BadFile, match=words):
        patched(patch, kind)


def test_what_a_patch_breaks_the_lint_finds(capsys, tmp_path):
    patch = tmp_path / "patch.yaml"
    patch.write_text("kind: Job\nspec: {backoffLimt: 3, completions: 5}\n")
    words = ["--set", "name=train", "--set", "image=t:1", "--patch", str(patch), "--", "train.py"]
    run = Run(capsys, "render", "indexed-job", *words)
    assert run.code == 1
    assert "error unknown-key" in run.err and "error completions" in run.err
    assert "completions: 5" in run.out


FOLDER = Path(launch_templates.__file__).parent
SCRIPT = ["train.py", "--lr", "0.1", "$(X) $$", "{}: é"]
OVERLAY = """
resources: [base]
namePrefix: big-
images: [{name: msrun, newName: registry.example/train, newTag: "1.0"}]
patches:
  - target: {kind: JobSet}
    patch: |-
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/completions, value: 4}
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/parallelism, value: 4}
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/template/spec/containers/0/env/0/value, value: "8"}
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/template/spec/containers/0/env/1/value, value: "2"}
"""
SETTINGS = [
    {"image": "r.example/t:1"},
    {
        "image": "r.example/t:1", "nodes": 3, "local_worker_num": 4, "device_resource": "nvidia.com/gpu",
        "max_restarts": 2, "grace_s": 77, "queue": "team-a", "labels": {"team": "x"}, "annotations": {"a.b/c": "d"},
        "env": {"A": "1", "B": "x y"}, "node_selector": {"p": "h"}, "tolerations": [{"operator": "Exists"}],
        "pull_secret": "reg", "service_account": "sa", "priority": "high", "pull_policy": "Always",
        "init_containers": [{"name": "f", "image": "f:1"}],
    },
]  # fmt: skip


def run(*words):
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm; python3 .ci/install_helm.py FOLDER")
@pytest.mark.parametrize("values", SETTINGS, ids=["minimal", "full"])
def test_chart_renders_the_objects_that_the_kind_renders(values, tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({**values, "script": SCRIPT}))
    made = run("helm", "template", "train", FOLDER / "charts" / "msrun-jobset", "-n", "ml", "-f", path)
    device = {"device_target": "GPU"} if "device_resource" in values else {}
    expected = render_manifest("jobset", {**values, **device, "name": "train", "namespace": "ml"}, SCRIPT)
    assert list(yaml.safe_load_all(made)) == list(yaml.safe_load_all(expected))


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm; python3 .ci/install_helm.py FOLDER")
def test_chart_refuses_a_value_that_it_does_not_have():
    words = ["helm", "template", "train", str(FOLDER / "charts" / "msrun-jobset"), "--set", "image=a,script={t.py}"]
    done = subprocess.run([*words, "--set", "nodez=4"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode and "nodez" in done.stderr


def test_base_has_the_pod_of_the_kind_and_passes_the_lint():
    base = (FOLDER / "kustomize" / "jobset" / "jobset.yaml").read_text()
    assert lint_texts([("base", base)]) == []
    values = {"name": "msrun", "image": "msrun", "local_worker_num": 1, "network_policy": False}
    own, expected = yaml.safe_load(base), yaml.safe_load(render_manifest("jobset", values, ["train.py"]))
    for body in (own, expected):
        body["spec"]["network"].pop("subdomain", None)
        [container] = body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        del container["args"], container["env"]
    assert own == expected


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl; python3 .ci/install_helm.py FOLDER")
def test_overlay_of_the_base_gives_pods_that_find_each_other(tmp_path):
    shutil.copytree(FOLDER / "kustomize" / "jobset", tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(OVERLAY)
    made = run("kubectl", "kustomize", tmp_path)
    assert lint_texts([("made", made)]) == []
    body = yaml.safe_load(made)
    body["spec"]["network"]["subdomain"] = "big-msrun"  # JobSet's own default: its name
    pods = pods_of(yaml.safe_dump(body))
    assert len(pods) == 4 and pods[0].container["image"] == "registry.example/train:1.0"
    for rank, pod in enumerate(pods):
        job = find_surroundings(pod.environ, HostView(pod.name, f"{pod.subdomain}.{DOMAIN}"))
        assert job is not None
        numbers = {name: int(pod.args[name]) for name in ("worker_num", "local_worker_num")}
        options = {"node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0, **numbers}
        found = find_host_options(job, options, set(numbers), lambda: 0).options
        assert (found["node_rank"], numbers["worker_num"]) == (rank, 8)
        assert found["master_addr"] == f"big-msrun-node-0-0.big-msrun.{DOMAIN}"
