"""The pages of the documentation, and the code blocks in them.

An HTML comment in the line before a block says what a test does with it:

    <!-- file: NAME -->                  written under this name; console blocks of the page use it
    <!-- not run: REASON -->             only parsed: the options of its commands, the syntax of Python
    <!-- printed by: NAME -->            the output of this Python file, which runs with the Python blocks
    <!-- setup ... -->                   Python that runs before the block, on several lines
    <!-- setup-sh: COMMANDS -->          commands that run before the block
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from job_runner import REPOSITORY

DOCS = REPOSITORY / "docs"
DIRECTIVES = {"{click}", "{eval-rst}", "{toctree}"}
LANGUAGES = {"console", "json", "python", "sh", "text", "yaml"}

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<language>[^`]*)$")
_MARK = re.compile(r"<!-- (?P<kind>file|not run|printed by|setup-sh|setup)(?::|(?=\n)) ?(?P<text>.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    page: Path
    line: int
    """Of its first line, from 1."""
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    setup_line: int = 0
    """Of the first line of its setup."""

    @property
    def place(self):
        """Page and line, as an editor opens them."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def file_name(self):
        """What it is written as, or ""."""
        return self.marks.get("file", "")

    @property
    def is_run(self):
        """Whether nothing says that it cannot run."""
        return "not run" not in self.marks and "printed by" not in self.marks

    @property
    def commands(self):
        """Each command of a console block with its output; of a shell block without."""
        if self.language == "sh":
            return [(line, []) for line in self.text.splitlines() if line.strip() and not line.startswith("#")]
        found = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def pages():
    """Return every page that a reader gets."""
    found = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    found += [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
    return [*found, *sorted((REPOSITORY / "examples").rglob("*.md"))]


def blocks(page):
    """Return the code blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = []
    begin = 0
    index = 0
    while index < len(lines):
        match = _FENCE.match(lines[index])
        if match is None:
            index += 1
            continue
        end = lines.index(match["indent"] + match["fence"], index + 1)
        marks, setup_line = _marks_before(lines, begin, index)
        text = "".join(line[len(match["indent"]) :] + "\n" for line in lines[index + 1 : end])
        language = match["language"].partition(" ")[0]
        found.append(Block(page, index + 2, language, text, marks, setup_line))
        begin = index = end + 1
    return found


def prose(page):
    """Return a page without its code blocks, spans of code and comments."""
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", _without_brackets, text), flags=re.DOTALL)


def anchors(page):
    """Return the anchors of its headings, as GitHub and the site make them."""
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_brackets(span):
    return span[0].replace("](", "] (")


def _marks_before(lines, begin, fence):
    """Return the marks that stand directly above a block, and where a setup begins."""
    marks = {}
    setup_line = 0
    end = fence
    while end > begin and lines[end - 1].endswith("-->"):
        start = next((i for i in range(end - 1, begin - 1, -1) if lines[i].startswith("<!--")), None)
        match = _MARK.fullmatch("\n".join(lines[start:end])) if start is not None else None
        if start is None or match is None:
            break
        marks[match["kind"]] = match["text"]
        if match["kind"] == "setup":
            setup_line = start + 2
        end = start
    return marks, setup_line
