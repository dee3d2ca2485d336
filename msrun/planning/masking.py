"""Secrets in command lines, addresses and lines of text: hidden wherever msrun prints or writes them.

The workers get the real values. What a program's name is does not matter, only how its words look:

    --api_key VALUE   --token=VALUE   PASSWORD=VALUE   trainer.api_key=VALUE   https://user:VALUE@host

A name is taken apart at `_`, `-`, `.` and capital letters. PASSWORD, PASSWD, SECRET and CREDENTIAL are enough anywhere
in it. KEY and TOKEN are everyday words in training (`--num_keys`, `--tokenizer`, `--key_dim`, `--max_tokens`,
`--num_key_value_heads`, `--pad_token_id`), so they count only as the last word and in the singular: `--api_key`,
`--hf-token`, `accessToken`, `--key`."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from fnmatch import translate

from msrun import contract
from msrun.errors import UsageError

MASK = "********"
MIN_SECRET_CHARS = 4
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose values are hidden; there a value too many is hidden rather than one too few."""

_ALWAYS = r"(?i)SECRET|PASSWORD|PASSWD|CREDENTIAL"
_LAST_WORD = r"(?i)(api|access|secret|private|auth)?(key|token)\Z"
_WORD_BORDER = r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])"
_ASSIGNMENT = re.compile(r"([-+]*[A-Za-z_][\w.-]*)=")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*\Z")
_URL_PASSWORD = re.compile(r"((?<![A-Za-z0-9+.-])[0-9+.-]*+[A-Za-z][A-Za-z0-9+.-]*+://[^/\s:@]*+):([^/\s@]++)@")
"""Tried once for every run of letters, not for every letter: the time grows with the text, not with its square."""


def is_secret_name(name: str) -> bool:
    if not SECRET_NAME.search(name):
        return False
    words = [word for word in re.split(_WORD_BORDER, name) if word]
    return bool(re.search(_ALWAYS, name) or (words and re.match(_LAST_WORD, words[-1])))


def mask_url(text: str) -> str:
    """Return `text` with the passwords of `scheme://user:password@host` hidden."""
    return _URL_PASSWORD.sub(rf"\1:{MASK}@", text) if "://" in text else text


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the values of secret-looking names and passwords in URLs hidden, for plans, logs and events."""
    return {name: MASK if SECRET_NAME.search(name) else mask_url(value) for name, value in env.items()}


def mask_words(words: Sequence[str]) -> list[str]:
    return [shown for shown, _ in _masked(words)]


def secret_values(words: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that `mask_words` hides and secrets of `env`, longest first, but for very short ones."""
    found = {secret for _, secrets in _masked(words) for secret in secrets}
    for name, value in env.items():
        found |= {value} if SECRET_NAME.search(name) else {password for _, password in _URL_PASSWORD.findall(value)}
    return tuple(sorted((one for one in found if len(one) >= MIN_SECRET_CHARS), key=lambda one: (-len(one), one)))


def hide_values(text: str, values: Sequence[str]) -> str:
    for value in values:
        text = text.replace(value, MASK)
    return text


def _masked(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each word as it may be shown, with its secrets; what begins with -- is no secret option's value."""
    is_value = False
    for word in words:
        is_value = is_value and not word.startswith("--")
        yield (MASK, [word]) if is_value else _masked_word(word)
        is_value = not is_value and bool(_OPTION.match(word)) and is_secret_name(word)


def _masked_word(word: str) -> tuple[str, list[str]]:
    begin = 0
    while match := _ASSIGNMENT.match(word, begin):
        begin = match.end()
        if begin < len(word) and is_secret_name(match[1]):
            return word[:begin] + MASK, [word[begin:]]
    value = word[begin:]
    return word[:begin] + mask_url(value), [password for _, password in _URL_PASSWORD.findall(value)]


NO_FAMILIES = "none"  # the word that turns the list below off

FAMILIES = (  # what goes to the hosts unless the user says none
    # where programs, libraries and modules are
    *("PATH", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    # what torch compiles with
    *("CC", "CXX", "CPATH", "LIBRARY_PATH", "MAX_JOBS"),
    # compute threads and memory
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "DNNL_*", "ONEDNN_*"),
    *("MALLOC_*", "TCMALLOC_*"),
    # communication
    *("NCCL_*", "RCCL_*", "GLOO_*", "TP_SOCKET_IFNAME", "UCX_*", "UCC_*", "FI_*", "RDMAV_*", "IBV_*", "HCCL_*"),
    # frameworks
    *("TORCH*", "PYTORCH_*", "TRITON_*", "MS_*", "GLOG_*", "NVTE_*"),
    # devices: CUDA, ROCm, Ascend
    *("CUDA_*", "CUDNN_*", "CUBLAS_*", "CUBLASLT_*", "HIP_*", "HSA_*", "ROCM_*", "MIOPEN_*"),
    *("ASCEND_*", "ACL_*", "ACLNN_*", "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF", "COMBINED_ENABLE", "INF_NAN_MODE_*"),
    # data, models and records of experiments, but for their tokens
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "DIFFUSERS_*", "TOKENIZERS_PARALLELISM", "WANDB_*", "MLFLOW_*"),
    # time and language
    *("TZ", "LANG", "LANGUAGE", "LC_*"),
)

NEVER = (  # what goes to no host, whatever the patterns are
    # this login and its terminal
    *("SSH_*", "DISPLAY", "WAYLAND_*", "XAUTHORITY", "XDG_*", "DBUS_*", "LS_COLORS", "TERM*", "COLORTERM", "COLUMNS"),
    *("LINES", "WINDOWID", "TMUX*", "STY", "SUDO_*", "GPG_*", "KRB5CCNAME"),
    # this shell
    *("_", "PWD", "OLDPWD", "SHLVL", "SHELL", "BASH_*", "ENV", "PS1", "PROMPT*"),
    # this user and this host
    *("HOME", "USER", "LOGNAME", "USERNAME", "MAIL", "HOST", "HOSTNAME", "TMPDIR", "TMP", "TEMP"),
    *("HCCL_IF_IP", "MS_WORKER_IP", "NCCL_HOSTID"),
    # this host's devices: those of the others are theirs to choose
    *("*_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_MPS_*"),
    # this interpreter
    *("PYTHONHOME", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR", "PYTHONSTARTUP", "PYTHONINSPECT"),
    # this process as another launcher or service has started it
    *("MSRUN_*", "SLURM_*", "SLURMD_*", "SBATCH_*", "SRUN_*", "OMPI_*", "OPAL_*", "PRTE_*", "PMI_*", "PMIX_*"),
    "HYDRA_*",
    *("MPI_LOCALNRANKS", "MPI_LOCALRANKID", "PBS_*", "LSB_*", "PET_*", "TORCHELASTIC_*", "KUBERNETES_*", "VC_*"),
    *("JOB_COMPLETION_INDEX", "NODE_RANK", "NNODES", "NOTIFY_SOCKET", "LISTEN_*", "INVOCATION_ID", "JOURNAL_STREAM"),
    *("MS_SCHED*", "MS_SERVER_NUM", "MS_PSERVER*", "MS_HCCL_CM_INIT"),
    *sorted(contract.RANK_VARIABLES | contract.JOB_VARIABLES),
)

_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"
_PATTERN = r"[A-Za-z_*?\[][A-Za-z0-9_*?\[\]!-]*\Z"


def forwarded_environment(caller: Mapping[str, str], patterns: Sequence[str] = ()) -> dict[str, str]:
    """Return the launcher's variables that go to every host; `patterns`: further globs, none turns `FAMILIES` off."""
    is_asked = _matcher([pattern for pattern in patterns if pattern != NO_FAMILIES])
    is_usual, is_refused = _matcher(_usual(patterns)), _matcher(NEVER)
    return {
        name: value
        for name, value in sorted(caller.items())
        if re.match(_NAME, name)
        and (is_asked(name) or (is_usual(name) and not is_secret_name(name) and mask_url(value) == value))
        and not is_refused(name)
    }


def explain_kept_secrets(
    caller: Mapping[str, str], patterns: Sequence[str] = (), given: Container[str] = frozenset()
) -> str:
    """Return which secrets would go to the hosts if they were none, and --env did not give them; empty for none."""
    would_go = forwarded_environment(dict.fromkeys(caller, ""), [*patterns, *_usual(patterns)])
    kept = [name for name in would_go if name not in {*forwarded_environment(caller, patterns)} and name not in given]
    return f"secrets stay here: {', '.join(kept)}; --env {kept[0]} gives it to all workers" if kept else ""


def _usual(patterns: Sequence[str]) -> Sequence[str]:
    return () if NO_FAMILIES in patterns else FAMILIES


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse what is no pattern of names, and a name that goes to no host (UsageError)."""
    is_refused = _matcher(NEVER)
    for pattern in patterns:
        if not re.match(_PATTERN, pattern):
            remedy = (
                "--env gives a variable a value" if "=" in pattern else "letters, digits, _ and the globs * ? [] only"
            )
            raise UsageError(f"--forward_env {pattern!r}: not a name and no pattern of names; {remedy}")
        if re.match(_NAME, pattern) and is_refused(pattern):
            is_ours = pattern in contract.RANK_VARIABLES | contract.JOB_VARIABLES
            why = "msrun sets it for every worker; leave it out"
            other = f"belongs to this host or its login; --env {pattern}=VALUE sets it for all workers"
            raise UsageError(f"--forward_env {pattern}: {why if is_ours else other}")


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    expression = re.compile("|".join(map(translate, patterns)) or r"(?!)")
    return lambda name: bool(expression.match(name))
