"""docs/reference/models.md: what came of every model in every mode."""

import re
from importlib.metadata import version

from job_runner import REPOSITORY

from zoo.collection import ENTRIES
from zoo.entry import ROWS
from zoo.packages import PACKAGES
from zoo.training import MICRO_BATCHES, MODES, STAGES, STEPS, Outcome, tolerance

PAGE = REPOSITORY / "docs" / "reference" / "models.md"

_FIGURE = re.compile(r"\b\d\.\de[+-]\d\d\b")
_FOLDERS = re.compile(r"/\S*/(?=[^/\s]+\.py:\d)")
"""Of a file that a refusal names: they are others on other machines."""

_TEXT = """\
# Models of other packages

{models} models of torchvision, timm, transformers and torch, as their packages ship them, in small sizes and with
random weights; {trained} of them train in semi_auto. Measured on CPU (gloo) with {versions}.

<!-- not run: installs the packages -->
```sh
pip install -e '.[test,zoo]'
pytest tests/zoo                       # with --update-golden it writes this page
```

A number is the largest relative difference, on any rank, of the losses of {steps} optimizer steps from those of one
process on the same batch of {rows} samples. Models marked "fp64" run in float64, where {float64:.0e} is allowed; the
others in float32, where {float32:.0e} is. "refused" is an error at the first call; its text is at the end.

- hsdp cuts every parameter. Tensor-parallel strategies cut layers in two; on 4 ranks the batch is cut in two as well.
  The pipeline has {stages} stages and {micro_batches} micro batches.
- Models with random numbers in forward are compared with `AutoParallel` in one process; those with batch norm in a
  pipeline or data_parallel with one process that divides the batch in the same way; all others with torch alone.
- Optimizers: AdamW for GPT-2 and Llama, else SGD with momentum; the GPT with tied weights has two parameter groups,
  clipping and a cosine learning rate."""


def render(found):
    """Return the page; `found` holds the outcomes of each number of ranks."""
    reasons = []
    tables = [_table(ranks, outcomes, reasons) for ranks, outcomes in found.items()]
    text = _TEXT.format(
        models=len(ENTRIES),
        trained=sum(_trains(found[2][name, "semi_auto"], entry) for name, entry in ENTRIES.items()),
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", *PACKAGES)),
        steps=STEPS,
        rows=ROWS,
        float64=_tolerance(is_float64=True),
        float32=_tolerance(is_float64=False),
        stages=STAGES,
        micro_batches=MICRO_BATCHES,
    )
    if reasons:
        tables.append("## Refused\n\n" + "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)))
    return "\n\n".join([text, *tables]) + "\n"


def read(page):
    """Return the outcomes of each number of ranks that a page says."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", page.partition("## Refused\n")[2], re.MULTILINE))
    found = {}
    for ranks, table in re.findall(r"^## (\d+) ranks\n\n((?:\|.*\n)+)", page, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found[int(ranks)] = {
            (row[0].removesuffix(" (fp64)"), mode): _outcome(cell, reasons)
            for row in rows
            for mode, cell in zip(head[2:], row[2:], strict=True)
        }
    return found


def kind(outcome):
    """Return what a page says of an outcome but for its figure: why it was refused, or whether it is a difference."""
    if outcome.difference is not None:
        return "difference"
    return _FOLDERS.sub("", outcome.refusal) or "fails"


def _trains(outcome, entry):
    return outcome.difference is not None and outcome.difference <= tolerance(entry)


def _tolerance(*, is_float64):
    return next(tolerance(entry) for entry in ENTRIES.values() if entry.is_float64 == is_float64)


def _table(ranks, outcomes, reasons):
    models = [name for name in ENTRIES if any(model == name for model, _ in outcomes)]
    modes = [mode for mode in MODES if any(other == mode for _, other in outcomes)]
    lines = [
        f"## {ranks} ranks",
        "",
        f"| model | from | {' | '.join(modes)} |",
        f"| --- | --- |{' --- |' * len(modes)}",
    ]
    for model in models:
        entry = ENTRIES[model]
        name = f"{model} (fp64)" if entry.is_float64 else model
        cells = [_cell(entry, outcomes[model, mode], reasons) for mode in modes]
        lines.append(f"| {name} | {entry.source} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _outcome(cell, reasons):
    refused = re.fullmatch(r"refused \((\d+)\)", cell)
    if refused:
        return Outcome(refusal=reasons[refused[1]])
    figure = _FIGURE.search(cell)
    return Outcome(difference=float(figure[0])) if figure else Outcome(failure=cell)


def _cell(entry, outcome, reasons):
    if outcome.difference is not None:
        figure = f"{outcome.difference:.1e}"
        return figure if _trains(outcome, entry) else f"differs: {figure}"
    if not outcome.refusal:
        return "fails"
    reason = kind(outcome)
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"
