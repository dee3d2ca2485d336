"""Names, quantities and written YAML of a job, and the plan of an msrun, which becomes a job or is refused."""

import io
import sys
from decimal import Decimal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch_templates import BadFile, names
from launch_templates.cli import main
from launch_templates.names import find_reference
from launch_templates.render import dump_documents
from launch_templates.settings import read_plan
from launch_templates.values import find_quantity, parse_quantity
from msrun import contract

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
    with pytest.raises(SystemExit) as ended:
        main(["render", "jobset", *words])
    assert ended.value.code == 0
    *_, body = yaml.safe_load_all(capfd.readouterr().out)
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
