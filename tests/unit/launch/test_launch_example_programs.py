"""The installed examples: listed with what they show, and copied whole, over nothing that is there."""

from pathlib import Path

import pytest
from job_runner import REPOSITORY

from msrun.cli import main
from msrun.errors import UsageError
from msrun.launch.example_programs import LEFT_BY_RUNS, copy_examples, how_to_run, list_examples

EXAMPLES = REPOSITORY / "examples"


def test_every_folder_with_a_program_is_listed_with_a_sentence():
    found = list_examples()
    scripts = EXAMPLES.glob("*/*/run.sh")
    assert list(found) == sorted(path.parent.relative_to(EXAMPLES).as_posix() for path in scripts)
    assert all(summary.endswith(".") for summary in found.values())


def test_copy_holds_every_file_but_what_runs_have_left(tmp_path):
    (folder,) = copy_examples("torch/startup_methods", tmp_path / "new folder")
    assert folder == tmp_path / "new folder" / "torch" / "startup_methods"
    expected = {path.name for path in (EXAMPLES / "torch" / "startup_methods").iterdir()} - set(LEFT_BY_RUNS)
    assert {path.name for path in folder.iterdir()} == expected
    assert (folder / "train.py").read_bytes() == (EXAMPLES / "torch" / "startup_methods" / "train.py").read_bytes()


def test_all_examples_are_copied_or_none(tmp_path):
    (tmp_path / "torch" / "elastic").mkdir(parents=True)
    with pytest.raises(UsageError, match="elastic: is there already; remove it, or give another DIR"):
        copy_examples(None, tmp_path)
    assert [path.name for path in (tmp_path / "torch").iterdir()] == ["elastic"]
    (tmp_path / "torch" / "elastic").rmdir()
    copied = [path.relative_to(tmp_path).as_posix() for path in copy_examples(None, tmp_path)]
    assert copied == list(list_examples())
    assert (tmp_path / "mindspore" / "distributed_training" / "resnet.py").is_file()


def test_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/torch/gpt: cannot be written \(.*\); give another DIR"):
        copy_examples("torch/gpt", tmp_path / "file")


def test_next_step_is_a_command_that_a_shell_reads_as_meant(odd_path):
    assert how_to_run(Path("x y") / "gpt") == "to run it: bash 'x y/gpt/run.sh'"
    (guided,) = copy_examples("torch/startup_methods", odd_path)
    assert how_to_run(guided) == f"see {guided}/README.md"


def run(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(["examples", *words])
    shown = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, shown.out, shown.err


def test_command_lists_and_copies(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, _ = run(capsys, "list")
    assert code == 0 and [line.split()[0] for line in text.splitlines()] == list(list_examples())
    code, text, _ = run(capsys, "copy", "torch/gpt")
    assert code == 0 and text == "copied msrun_examples/torch/gpt\nto run it: bash msrun_examples/torch/gpt/run.sh\n"
    assert (tmp_path / "msrun_examples" / "torch" / "gpt" / "train.py").is_file()
    assert run(capsys)[1].startswith("Usage: msrun examples")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["copy", "torch/gptt"], "torch/gptt: no such example (did you mean torch/gpt?); there are "),
        (["copy", "torch/gpt", "a", "b"], "Got unexpected extra argument (b); see msrun examples copy --help"),
        (["--lsit"], "--lsit: no such option; msrun examples --help lists them"),
        (["lsit"], "No such command 'lsit'"),
    ],
)
def test_wrong_words_are_one_line_and_status_2(capsys, words, line):
    code, text, errors = run(capsys, *words)
    assert (code, text) == (2, "")
    (shown,) = errors.splitlines()
    assert shown.startswith(f"msrun: error: {line}")


def test_example_comes_with_the_one_whose_scripts_it_runs(tmp_path):
    folders = copy_examples("torch/distributed_training", tmp_path)
    assert [folder.name for folder in folders] == ["distributed_training", "startup_methods"]
