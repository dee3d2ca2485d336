"""Which variables of the launcher go to the hosts, which never do, and that values are not touched."""

import pytest

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.masking import NEVER, check_patterns, explain_kept_secrets, forwarded_environment


def names(text):
    return text.split()


GOES = names("""
    PATH LD_LIBRARY_PATH PYTHONPATH PYTHONHASHSEED PYTHONUNBUFFERED VIRTUAL_ENV CONDA_PREFIX CC CXX
    OMP_NUM_THREADS OMP_PROC_BIND GOMP_SPINCOUNT KMP_AFFINITY MKL_NUM_THREADS OPENBLAS_NUM_THREADS MALLOC_ARENA_MAX
    NCCL_DEBUG NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME UCX_TLS FI_PROVIDER
    TORCH_LOGS TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF TRITON_CACHE_DIR
    CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS CUBLAS_WORKSPACE_CONFIG
    HCCL_CONNECT_TIMEOUT HCCL_SOCKET_IFNAME ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_LAUNCH_BLOCKING
    MS_ENABLE_LCCL MS_TOPO_TIMEOUT MS_RECEIVE_MSG_TIMEOUT GLOG_v GLOG_log_dir
    HF_HOME TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM WANDB_PROJECT MLFLOW_TRACKING_URI
    TZ LANG LC_ALL
""")

STAYS = names("""
    SSH_AUTH_SOCK SSH_CONNECTION DISPLAY XAUTHORITY XDG_RUNTIME_DIR LS_COLORS TERM TERM_PROGRAM TMUX STY SUDO_USER
    _ PWD OLDPWD SHLVL SHELL BASH_ENV BASH_FUNC_x ENV HOME USER LOGNAME MAIL HOSTNAME TMPDIR
    HCCL_IF_IP MS_WORKER_IP NCCL_HOSTID
    CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES ASCEND_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
    PYTHONHOME PYTHONSTARTUP PYTHONEXECUTABLE
    MSRUN_HOSTS MSRUN_TOKEN SLURM_JOB_ID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK PET_NNODES KUBERNETES_SERVICE_HOST
    TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE JOB_COMPLETION_INDEX NODE_RANK
    MS_ROLE MS_SCHED_HOST MS_SCHED_PORT MS_SCHED_NUM MS_WORKER_NUM MS_SERVER_NUM MS_NODE_ID MS_NODE_RANK
    RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK_ID RANK_SIZE DEVICE_ID
    RANK_TABLE_FILE LD_PRELOAD EDITOR MY_OWN AWS_SECRET_ACCESS_KEY
""")

NEVER_WITH_STAR = set(STAYS) - {"LD_PRELOAD", "EDITOR", "MY_OWN", "AWS_SECRET_ACCESS_KEY"}


def test_what_decides_how_a_program_runs_goes_to_the_hosts():
    assert [name for name in GOES if forwarded_environment({name: "x"}) != {name: "x"}] == []


def test_what_belongs_to_this_host_login_or_launcher_stays():
    assert [name for name in STAYS if forwarded_environment({name: "x"})] == []


SECRETS = {
    "HF_TOKEN": "x",
    "WANDB_API_KEY": "x",
    "MLFLOW_TRACKING_PASSWORD": "x",
    "MLFLOW_TRACKING_URI": "https://me:word@tracking",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_go_to_the_hosts_only_when_somebody_names_them(name):
    caller = {name: SECRETS[name], "PATH": "/bin"}
    assert forwarded_environment(caller) == {"PATH": "/bin"}
    assert explain_kept_secrets(caller) == f"secrets stay here: {name}; --env {name} gives it to all workers"
    for pattern in (name, name[:4] + "*", "*"):
        assert forwarded_environment(caller, [pattern]) == caller
        assert explain_kept_secrets(caller, [pattern]) == ""
    assert explain_kept_secrets(caller, ["none"]) == ""


def test_pattern_of_everything_takes_all_but_what_never_goes():
    caller = dict.fromkeys([*GOES, *STAYS], "x")
    assert set(forwarded_environment(caller, ["*"])) == {*GOES, *STAYS} - NEVER_WITH_STAR


def test_patterns_are_added_and_none_turns_the_usual_off():
    caller = {"PATH": "/bin", "FOO_A": "1", "FOO_B": "2", "BAR": "3", "foo_c": "4"}
    assert set(forwarded_environment(caller, ["FOO_*"])) == {"PATH", "FOO_A", "FOO_B"}
    assert set(forwarded_environment(caller, ["FOO_[A]", "BA?"])) == {"PATH", "FOO_A", "BAR"}
    assert set(forwarded_environment(caller, ["none", "BAR"])) == {"BAR"}
    assert forwarded_environment(caller, ["none"]) == {}


def test_names_that_no_shell_could_set_stay():
    caller = {"BASH_FUNC_module%%": "() { :; }", "NCCL_A.B": "1", "NCCL A": "1", "2X": "1", "NCCL_\u00e9": "1", "": "1"}
    assert forwarded_environment(caller, ["*"]) == {}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "--forward_env '': not a name and no pattern"),
        ("A=1", "--forward_env 'A=1': .*--env gives a variable a value"),
        ("A\n", "not a name"),
        ("HOME", "--forward_env HOME: belongs to this host or its login; --env HOME=VALUE sets it"),
        ("RANK", "--forward_env RANK: msrun sets it for every worker; leave it out"),
    ],
)
def test_pattern_is_refused(pattern, message):
    with pytest.raises(UsageError, match=message):
        check_patterns(["FOO", pattern])


def test_every_variable_of_the_contract_is_among_those_that_never_go():
    assert set(NEVER) >= contract.RANK_VARIABLES | contract.JOB_VARIABLES
