"""Texts that are compared in full with a file of tests/golden; of the fixture `golden`, which ranks may have, too."""

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def compare_page(is_update, path, made):
    """The same for a page of the documentation, of which a test makes a part: `made` is the page as it should be."""
    if is_update:
        path.write_text(made, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == made, "if meant, run pytest --update-golden"


def compare_golden(is_update, name, text):
    path = GOLDEN / name
    if is_update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing; look at what it would hold and run pytest --update-golden"
    assert text == path.read_text(encoding="utf-8"), f"differs from {name}; if meant, run pytest --update-golden"
