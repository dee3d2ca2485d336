"""Runs cases of the zoo in real processes, and joins what the ranks found."""

import json
from dataclasses import dataclass
from pathlib import Path

from job_runner import WORKER_IMPORTS, WORKER_PATH

from zoo.collection import ENTRIES
from zoo.training import modes_of

CASE_DEADLINE_S = 90.0
_WORKER = Path(__file__).with_name("worker.py")

Case = tuple[str, str]
"""A model and a mode."""

_ON_FOUR = ("mobilenet_v3_small", "swin, drop path", "VAE", "GPT, tied weights", "Llama", "Mixtral", "T5")
_MODES_ON_FOUR = ("semi_auto", "hsdp level3", "tensor parallel", "pipeline")
CASES = {
    2: [(name, mode) for name, entry in ENTRIES.items() for mode in modes_of(entry)],
    4: [(name, mode) for name in _ON_FOUR for mode in modes_of(ENTRIES[name]) if mode in _MODES_ON_FOUR],
}
"""Number of ranks -> what runs on them; on 4, in which two ways of cutting stand together, a part."""


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    difference: float | None = None
    """The largest relative difference of a loss, on any rank."""
    refusal: str = ""
    """The error of msrun that every rank raised."""
    failure: str = ""
    """Anything else: another error, ranks that disagree, a job that ended or hung."""
    seconds: float = 0.0


def run_cases(runner, world_size, cases, folder):
    """Return what comes of every case; a case that ends its job, or hangs, fails alone."""
    outcomes = {}
    remaining = list(cases)
    while remaining:
        attempt = folder / f"{world_size}-{len(outcomes)}"
        attempt.mkdir(parents=True)
        Path(attempt, "cases.json").write_text(json.dumps(remaining))
        deadline_s = CASE_DEADLINE_S * (len(remaining) + 1)
        finished = runner.run(
            f"--worker_num={world_size}",
            "--quiet",
            *(f"--preload={name}" for name in (*WORKER_IMPORTS, "zoo.collection")),
            _WORKER,
            attempt,
            str(CASE_DEADLINE_S),
            cwd=attempt,
            env={"PYTHONPATH": WORKER_PATH},
            deadline_s=deadline_s,
        )
        before = len(outcomes)
        ranks = [_read(attempt / f"{rank}.jsonl") for rank in range(world_size)]
        for case in list(remaining):
            found = [rank.get(case) for rank in ranks]
            if finished.code and not all(f is not None and len(f) > 2 for f in found):
                if any(f is not None for f in found):
                    outcomes[case] = Outcome(failure=_lost(found, finished.stderr))
                    remaining.remove(case)
                break
            outcomes[case] = _join([f for f in found if f is not None])
            remaining.remove(case)
        assert len(outcomes) > before, finished.stderr
    return outcomes


def _read(path):
    """Return the last line of each case that one rank began."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {(line["model"], line["mode"]): line for line in lines}


def _join(ranks):
    seconds = max(rank["seconds"] for rank in ranks)
    if all("difference" in rank for rank in ranks):
        worst = max((rank["difference"] for rank in ranks), key=lambda value: (value != value, value))
        return Outcome(difference=worst, seconds=seconds)
    if all(rank.get("is_refusal") for rank in ranks):
        return Outcome(refusal=ranks[0]["error"], seconds=seconds)
    texts = [f"rank {number}: {rank.get('traceback', 'no error')}" for number, rank in enumerate(ranks)]
    return Outcome(failure="\n".join(texts), seconds=seconds)


def _lost(ranks, stderr):
    texts = [
        f"rank {number}: " + ("did not begin" if rank is None else rank.get("traceback", "did not end, or no error"))
        for number, rank in enumerate(ranks)
    ]
    return "\n".join(["the job ended", *texts, stderr])
