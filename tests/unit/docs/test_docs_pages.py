"""The documentation as text: links lead somewhere, blocks are what they say, options exist, tables are whole.
The pages of a job's settings and of lint rules say what the sources say."""

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import click
import doc_pages
import pytest
import yaml
from doc_pages import DIRECTIVES, DOCS, LANGUAGES
from job_runner import REPOSITORY

from launch_templates import list_kinds
from launch_templates.cli import cli as launch_template
from launch_templates.kinds import takers
from launch_templates.lint import RULES
from launch_templates.spec import settings_of_spec
from msrun import contract
from msrun.cli import command as msrun
from msrun.cli.options import Sources
from msrun.cli.words import normalise, translate
from msrun.errors import UsageError
from ranktable.cli import cli as ranktable

COMMANDS = {"msrun": msrun, "ranktable": ranktable, "launch-template": launch_template}
LAUNCHERS = {"srun", "mpirun"}
USERS_OWN = {"API_KEY"}
"""Given by --env in the plan of tests/golden."""
UNDERSCORED = ranktable.context_settings["token_normalize_func"]
OF_A_WORKER = (
    contract.RANK_VARIABLES | contract.JOB_VARIABLES | {contract.MS_TOPO_TIMEOUT, contract.TORCH_FR_BUFFER_SIZE}
)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def all_blocks():
    return [block for page in doc_pages.pages() for block in doc_pages.blocks(page)]


def test_every_link_and_anchor_leads_somewhere():
    dead = []
    for page in doc_pages.pages():
        for target in LINK.findall(doc_pages.prose(page)):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            other = (page.parent / path).resolve() if path else page
            if not other.is_file() or (anchor and anchor not in doc_pages.anchors(other)):
                dead.append(f"{page.relative_to(REPOSITORY)}: {target}")
    assert dead == []


def test_every_page_of_the_site_is_in_the_sidebar_and_described_in_the_index():
    index = DOCS / "index.md"
    listed = {
        (DOCS / line).resolve()
        for block in doc_pages.blocks(index)
        if block.language == "{toctree}"
        for line in block.text.splitlines()
        if line and not line.startswith(":")
    }
    described = re.findall(r"^- \[[^]]+\]\((\S+)\.md\): \S", doc_pages.prose(index), re.MULTILINE)
    pages = {page.with_suffix("") for page in doc_pages.pages() if page.is_relative_to(DOCS)} - {DOCS / "index"}
    assert pages == listed == {(DOCS / name).resolve() for name in described}


def test_blocks_have_a_known_language_and_parse_as_it():
    faults = []
    for block in all_blocks():
        if block.language not in LANGUAGES | DIRECTIVES:
            faults.append(f"{block.place}: language {block.language!r} is none of {sorted(LANGUAGES)}")
            continue
        try:
            if block.language == "python":
                ast.parse(block.text)
            elif block.language == "json":
                json.loads(block.text)
            elif block.language == "yaml":
                yaml.safe_load(block.text)
            elif block.language == "console" and not block.text.startswith("$ "):
                faults.append(f"{block.place}: a console block begins with a command")
        except (SyntaxError, ValueError, yaml.YAMLError) as error:
            faults.append(f"{block.place}: {error}")
    assert faults == []


def test_commands_have_options_that_exist():
    """Also those that cannot run here: Slurm, several hosts, a cluster."""
    faults = []
    for block in all_blocks():
        for line, shown in block.commands if block.language in ("sh", "console") else []:
            for words in own_commands(line):
                problem = find_usage_error(words)
                if problem and not any(": error: " in said for said in shown):
                    faults.append(f"{block.place}: {shlex.join(words)}: {problem}")
    for page in doc_pages.pages():
        for span in re.findall(r"`([^`]*\b(?:msrun|ranktable|launch-template) [^`]*)`", doc_pages.prose(page)):
            for words in own_commands(span):
                problem = find_usage_error(words)
                if "no such option" in problem.lower():
                    faults.append(f"{page.relative_to(REPOSITORY)}: {shlex.join(words)}: {problem}")
    assert faults == []


def own_commands(line):
    """Return the calls of this project's commands in a shell line, also those that another launcher starts."""
    found = []
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    for part in re.split(r"\x00(?:&&|\|\||\||;)\x00", "\x00".join(["", *words, ""])):
        own = [word for word in part.split("\x00") if word]
        while own and (re.match(r"\w+=", own[0]) or own[0] in LAUNCHERS):
            starts = [index for index, word in enumerate(own[1:], 1) if word in COMMANDS]
            own = own[starts[0] if own[0] in LAUNCHERS and starts else 1 :]
        own = own[: own.index(">")] if ">" in own else own
        if own and own[0] in COMMANDS and len(own) > 1:
            found.append(own)
    return found


def find_usage_error(words):
    """Return what is wrong with a command's options, or "". Nothing is started."""
    command, own = COMMANDS[words[0]], words[1:]
    if {"--help", "--version"} & {*own}:
        return ""
    try:
        if isinstance(command, click.Group):
            _, sub, own = command.resolve_command(click.Context(command), own)
            assert sub is not None
            command = sub
            with click.Context(launch_template if words[0] == "launch-template" else ranktable) as parent:
                parent.token_normalize_func = UNDERSCORED if words[0] == "ranktable" else None
                command.make_context(words[1], own, parent=parent)
        else:
            command.make_context(words[0], normalise(translate(own, {}, lambda: 1)[0]), obj=Sources())
    except UsageError:
        return ""  # a file of the reader's that is not here; only a --config is opened so early
    except click.ClickException as error:
        return "" if "does not exist" in error.format_message() else error.format_message()
    return ""


def test_names_and_exit_statuses_of_the_contract_are_explained():
    constants = {name: value for name, value in vars(contract).items() if name.isupper()}
    explained = {
        "environment": OF_A_WORKER | contract.WORKER_SETTINGS | set_by_default(),
        "files": {value for value in constants.values() if isinstance(value, str) and Path(value).suffix},
    }
    missing = []
    for page, names in explained.items():
        text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        missing += [f"{page}: {name}" for name in sorted(names) if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert missing == []


def meanings():
    """Return the names of the contract that one docstring explains, and the docstring."""
    found = {}
    names = []
    for node in ast.parse(inspect.getsource(contract)).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
            case ast.Expr(value=ast.Constant(value=str(text))) if names:
                found[tuple(names)] = " ".join(text.split())
                names = []
            case _:
                names = []
    return found


def contract_table(kept):
    """Return a row for each meaning of the constants of the contract that are `kept`."""
    rows = []
    for names, text in meanings().items():
        values = [str(getattr(contract, name)) for name in names if kept(name)]
        rows += [f"| {', '.join(values)} | {text.removesuffix('.')} |\n"] if values else []
    return "".join(rows)


@pytest.mark.parametrize(
    ("page", "table", "kept"),
    [
        ("environment", "of a worker", OF_A_WORKER.__contains__),
        ("environment", "set by you", contract.WORKER_SETTINGS.__contains__),
        ("files", "exit statuses", lambda name: name.startswith("EXIT_")),
    ],
)
def test_tables_of_the_contract_are_its_docstrings(page, table, kept, golden_page):
    path = DOCS / "reference" / f"{page}.md"
    head = re.compile(rf"(?<=<!-- {table}: made by pytest --update-golden -->\n)(\| .+\n\| --- .+\n)(?:\| .+\n)*")
    text = path.read_text(encoding="utf-8")
    assert head.search(text)
    golden_page(path, head.sub(lambda match: match[1] + contract_table(kept), text))


def set_by_default():
    """Return the variables that a worker of a job without options gets."""
    plan = json.loads((REPOSITORY / "tests" / "golden" / "plan.json").read_text(encoding="utf-8"))
    return set(plan["hosts"][0]["env"]) - USERS_OWN


def test_every_public_name_of_the_runtime_is_in_its_reference():
    runtime = pytest.importorskip("msrun.runtime", exc_type=ImportError)
    text = (DOCS / "reference" / "runtime.md").read_text(encoding="utf-8")
    assert [name for name in runtime.__all__ if f"msrun.runtime.{name}\n" not in text] == []


REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGE = REFERENCE / "job_spec.md"
LINT_PAGE = REFERENCE / "lint_rules.md"
START = "<!-- rules: made by pytest --update-golden -->\n"


def row(setting):
    """The line of the table for one setting."""
    default = (
        "required" if setting.is_required else f"`{setting.default}`" if setting.default not in ({}, [], None) else ""
    )
    found = list(takers(setting.name))
    missing = [kind for kind in list_kinds() if kind not in found]
    pods = list(takers("labels"))
    others = [kind for kind in found if kind not in pods]
    without = [kind for kind in pods if kind not in found]
    if not missing:
        kinds = "all"
    elif len(missing) < 6:
        kinds = f"all but {', '.join(missing)}"
    elif len(without) < 4:
        kinds = ", ".join(["Kubernetes" + (f" (not {', '.join(without)})" if without else ""), *others])
    else:
        kinds = ", ".join(found)
    constraint = setting.value_type.constraint
    first = next(other for other in settings_of_spec().values() if other.value_type.constraint == constraint)
    if len(constraint.split()) > 5 and first.name != setting.name:
        constraint = f"as `{first.name}`"
    words = (f"`{setting.name}`", setting.value_type.type_name, default, kinds, f"{setting.meaning}; {constraint}")
    return f"| {' | '.join(word.replace('|', '/') for word in words)} |"


def table():
    yield "| setting | type | default | kinds | meaning; constraint |"
    yield "| --- | --- | --- | --- | --- |"
    yield from map(row, settings_of_spec().values())


def test_table_of_settings_is_that_of_the_dataclass(golden_page):
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition("| setting | type |")
    after = rest.partition("\n\n")[2]
    golden_page(PAGE, before + "\n".join(table()) + "\n\n" + after)


def test_sections_are_those_of_the_rules(golden_page):
    text = LINT_PAGE.read_text(encoding="utf-8")
    before, found, _ = text.partition(START)
    assert found
    sections = "".join(f"\n### {rule.rule_id}\n\n{rule.severity.capitalize()}. {rule.meaning}\n" for rule in RULES)
    golden_page(LINT_PAGE, before + START + sections)
