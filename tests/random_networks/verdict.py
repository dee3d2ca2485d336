"""Verdict: is a parallel run equal to one process, refused by name, or wrong?"""

import re
from dataclasses import dataclass

import torch

GOOD = ("equal", "refused", "invalid")
PEER_LEFT = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Connection refused|gloo.*(Timed out|timeout)", re.I
)
HEARD = ("cannot run this call", "CollectiveError: ")
"""What a rank says that has heard of the others' error."""
_ONE_RANKS_OWN = re.compile(r"torch\.optim\.|so a norm here")
"""Refusals outside of calls that all ranks make together: others may have nothing to refuse, and msrun ends them."""
_INTERNAL = re.compile(r"out of range|object is not|has no attribute|KeyError|IndexError|AssertionError|NoneType")
"""Words of Python's own errors: a refusal that quotes one hides it."""


@dataclass(frozen=True)
class Verdict:
    """What came out."""

    kind: str
    """equal; refused; different; internal error; refused by some ranks; several lines; invalid: the one process fails,
    so the case proves nothing."""
    message: str = ""
    trace: str = ""

    @property
    def is_good(self):
        """Return whether the promise is kept, as far as the case can tell."""
        return self.kind in GOOD

    @property
    def reason(self):
        """The message without numbers and names, so that equal reasons can be counted."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", self.message)
        text = re.sub(r"\b(blocks|network)\.[\w.]+", "...", text)
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text)[:160]


def tolerance(case):
    """Return the largest allowed difference, relative to a tensor's largest value."""
    if case.is_16_bit:
        return 6e-2  # what a gradient of many terms that cancel, as before a batch norm, has lost in 16 bits
    if case.optimizer[0] == "muon":
        return 1e-3  # torch's Muon rounds to bfloat16 inside
    return 1e-9


def judge(case, alone, ranks):
    """Compare the ranks with the one process."""
    refused = [report for report in ranks if report.kind == "refused"]
    broken = [(rank, report) for rank, report in enumerate(ranks) if report.kind == "error"]
    own = [(rank, report) for rank, report in broken if not PEER_LEFT.search(report.message)]
    if alone.kind != "done":
        if alone.kind == "refused" and len(refused) == len(ranks):
            return Verdict("refused", first_own(refused).error)
        return Verdict("invalid", f"one process: {alone.error}", alone.trace)
    assert alone.trained is not None
    if not bool(_vector(alone.trained.losses).isfinite().all()):
        return Verdict("invalid", "one process: a loss that is not finite")
    for rank, report in own:
        return Verdict("internal error", f"rank {rank}: {report.error}", report.trace)
    if refused and _ONE_RANKS_OWN.search(first_own(refused).error) and not own:
        return Verdict("refused", first_own(refused).error)
    if refused and len(refused) < len(ranks):
        return Verdict("refused by some ranks", f"{refused[0].error}; others left", refused[0].trace)
    if broken:
        return Verdict("internal error", f"rank {broken[0][0]}: {broken[0][1].error}", broken[0][1].trace)
    if refused:
        several = [report for report in refused if "\n" in report.message.strip()]
        if several:
            return Verdict("several lines", several[0].error, several[0].trace)
        reason = first_own(refused).error
        if hides_an_internal_error(reason):
            return Verdict("internal error", reason, refused[0].trace)
        if reason.startswith("VerificationError"):  # a step that is wrong, or a check that is
            return Verdict("different", reason, refused[0].trace)
        return Verdict("refused", reason)
    differences = compare(case, alone, ranks)
    return Verdict("different", "; ".join(differences)) if differences else Verdict("equal")


def hides_an_internal_error(reason):
    """Return whether a refusal quotes an error of Python's own."""
    return bool(_INTERNAL.search(reason))


def first_own(refused):
    """Return the report of the rank that met the reason itself."""
    own = [report for report in refused if not any(words in report.error for words in HEARD)]
    return (own or refused)[0]


def compare(case, alone, ranks):
    """Return what differs, in words; nothing when all is equal."""
    right = alone.trained
    assert right is not None
    limit, found = tolerance(case), []
    for rank, report in enumerate(ranks):
        trained = report.trained
        assert trained is not None
        losses = differ(_vector(trained.losses), _vector(right.losses))
        if losses > limit:
            found.append(f"rank {rank}: losses {_short(trained.losses)}, right {_short(right.losses)} ({losses:.1e})")
            break
        for step, (mine, whole) in enumerate(zip(trained.others, right.others, strict=True)):
            if mine is None or whole is None:
                continue
            stage_size = case.data_ranks
            difference = differ(mine, whole.chunk(stage_size)[rank % stage_size])
            if difference > 10 * limit:
                found.append(f"rank {rank}: second result of step {step} ({difference:.1e})")
        if case.pipeline is None:
            for name, value in right.buffers.items():
                difference = differ(trained.buffers[name], value)
                if difference > limit:
                    found.append(f"rank {rank}: buffer {name} ({difference:.1e})")
    trained = ranks[0].trained
    assert trained is not None
    for name, value in right.state.items():
        if name not in trained.state:
            found.append(f"{name} is missing in what was saved")
            continue
        difference = differ(trained.state[name], value)
        if difference > limit:
            found.append(f"{name} after training ({difference:.1e})")
    return found


def differ(mine, right):
    """Return the largest difference relative to the largest value, which counts as 1e-3 at least; inf for a shape."""
    if mine.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    mine, right = mine.double(), right.double()
    scale = max(float(right.abs().max()), 1e-3)
    difference = float((mine - right).abs().max()) / scale
    return difference if difference == difference else float("inf")


def _vector(values):
    return torch.tensor(list(values), dtype=torch.float64)


def _short(values):
    return "[" + ", ".join(f"{value:.9g}" for value in values) + "]"
