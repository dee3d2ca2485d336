"""Wrong input: exit status 2, one line that names value and remedy, nothing started and nothing written."""

import os
import re
import socket

import pytest
from asked_cases import one_fast, slow_but
from job_runner import WORKERS

from ranktable import build_table, encode_table

WRONG = {
    # name: (arguments, pattern that the line has to match)
    "nothing to run": ([], r"no SCRIPT given.*msrun train.py"),
    "device": (["/dev/null"], "/dev/null: is no ordinary file; give a program, or - to read one from standard input"),
    "missing script": (["trian.py"], r"trian\.py: no such file in .* \(did you mean train\.py\?\)"),
    "missing folder": (["no/train.py"], r"no/train\.py: .*folder .* does not exist"),
    "directory": (["folder"], r"folder: is a directory"),
    "no x bit": (["./plain"], r"\./plain: .*not executable; run chmod \+x"),
    "missing module": (["-m", "no_such_module.train"], r"-m no_such_module\.train: no module no_such_module in "),
    "no module name": (["-m", "no/module.py"], r"-m no/module\.py: not a module name"),
    "python alone": (["python"], r"python: no script after it"),
    "python -m alone": (["python", "-m"], r"python -m: no module after it"),
    "no worker": (["--worker_num=0", "train.py"], r"--worker_num 0: must be 1 or more"),
    "workers no number": (["--worker_num=two", "train.py"], r"--worker_num: 'two': give a number, auto, gpu or cpu"),
    "processors of other hosts": (["--worker_num=cpu", "--hosts=h1", "train.py"], r"--worker_num cpu and --hosts: it"),
    "accelerators that are none": (["--worker_num=gpu", "train.py"], r"--worker_num gpu: no accelerator is visible"),
    "workers of other hosts": (
        ["--local_worker_num=2", "--master_addr=10.0.0.1", "train.py"],
        r"--worker_num: is left out, but --master_addr or --node_rank says that there are other hosts",
    ),
    "no local worker": (["--local_worker_num=0", "train.py"], r"--local_worker_num 0: must be 1 or more"),
    "too many local": (
        ["--worker_num=2", "--local_worker_num=3", "train.py"],
        r"--local_worker_num 3: more than --worker_num 2",
    ),
    "several hosts": (["--worker_num=4", "--local_worker_num=2", "train.py"], r"--local_worker_num 2: less than"),
    "node rank": (["--node_rank=1", "train.py"], r"--node_rank 1: a job on one host has only node 0"),
    "unknown option": (["--worker_nmu=2", "train.py"], r"--worker_nmu: no such option \(did you mean --worker_num\?\)"),
    "dashes in an unknown option": (["--log-dri=x", "train.py"], r"--log-dri: .*did you mean --log-dir\?"),
    "abbreviation": (["--worker=2", "train.py"], r"--worker: no such option .did you mean --worker_num"),
    "short option": (["-N", "2", "train.py"], r"-N is mpirun's and srun's, .*did you mean --local_worker_num"),
    "option without its value": (["--worker_num"], r"--worker_num: no value after it; msrun --help"),
    "join": (["--join=maybe", "train.py"], r"--join: 'maybe': give True or False"),
    "dry run": (["--dry_run=yaml", "train.py"], r"--dry_run: 'yaml': give text or json"),
    "start method": (["--start_method=thread", "train.py"], r"--start_method: 'thread' is not one of"),
    "port too high": (["--master_port=70000", "train.py"], r"--master_port 70000: must be 0 to 65535"),
    "port negative": (["--master_port=-1", "train.py"], r"--master_port -1: must be 0 to 65535"),
    "address": (["--master_addr=-oProxy", "train.py"], r"--master_addr '-oProxy': not an address"),
    "time limit": (["--time_limit=-1", "train.py"], r"--time_limit -1: must be 0 or more seconds; 0 = no limit"),
    "restarts": (["--max_restarts=-1", "train.py"], r"--max_restarts -1: must be 0 or more"),
    "hang no number": (["--hang_time_out=nan", "train.py"], r"--hang_time_out"),
    "hang in the past": (["--hang_time_out=-1", "train.py"], r"--hang_time_out"),
    "timer": (["--time_limit=9", "--signals=ALRM", "train.py"], r"--signals ALRM and --time_limit: msrun's own timer"),
    "grace": (["--grace=-1", "train.py"], r"--grace -1: must be 0 or more seconds"),
    "tail beyond": (["--worker_num=2", "--tail_worker_log=2", "train.py"], r"--tail_worker_log 2: .*ranks are 0 to 1"),
    "log name": (["--worker_log_name=a/b", "train.py"], r"--worker_log_name a/b: "),
    "chdir": (["--chdir=nowhere", "train.py"], r"--chdir nowhere: no such directory"),
    "log dir is a file": (["--log_dir=plain", "train.py"], r"--log_dir .*plain is a file; give a directory"),
    "no job kept": (["--log_keep_jobs=0", "train.py"], r"--log_keep_jobs 0: must be 1 or more jobs"),
    "window in the past": (["--join_window=-1", "train.py"], r"--join_window -1: must be 0 or more seconds"),
    "no host is enough": (["--local_worker_num=1", "--min_hosts=0", "train.py"], r"--min_hosts 0: must be 1 or more"),
    "enough of one host": (
        ["--local_worker_num=2", "--min_hosts=1", "train.py"],
        r"--min_hosts 1: the job has one host",
    ),
    "more hosts than can be": (
        ["--worker_num=2", "--local_worker_num=1", "--master_addr=localhost", "--min_hosts=3", "train.py"],
        r"--min_hosts 3: must be 1 to 2, as many as",
    ),
    "log dir cannot be made": (["--log_dir=/proc/logs/x", "train.py"], r"--log_dir /proc/logs/x: .*give a directory"),
    "long script": (["x" * 300], r"x\.\.\.: the path is too long"),
    "long directory": (["--chdir=" + "x" * 300, "train.py"], r"x\.\.\.: the path is too long"),
    "deep cores": (["--bind_core=" + "[" * 3000, "train.py"], r"neither True, False nor a JSON object"),
    "home of nobody": (["--ssh_config=~nobody-here/x", "train.py"], r"--ssh_config ~nobody-here/x: there is no user"),
    "token for all": (
        ["--token_file=plain", "train.py"],
        r"--token_file plain: others may read it \(mode 0644\); chmod 600",
    ),
    "TLS file": (
        ["--tls_config=tls.json", "--worker_num=2", "--local_worker_num=1", "--master_addr=192.0.2.1", "train.py"],
        r"--tls_config tls\.json: ca_cert_path .*/b: cannot be read \(No such file or directory\)",
    ),
    "env name": (["--env=1X=2", "train.py"], r"--env '1X': not a variable name"),
    "env rank": (["--env=RANK=3", "train.py"], r"--env RANK: msrun sets it"),
    "env not set here": (["--env=NOT_SET_HERE", "train.py"], r"--env NOT_SET_HERE: not set here"),
    "env file missing": (["--env_file=no.env", "train.py"], r"--env_file no\.env: cannot be read \(No such file"),
    "env file line": (["--env_file=bad.env", "train.py"], r"--env_file bad\.env, line 2: 'no sign' is not NAME=value"),
    "env file no text": (["--env_file=binary", "train.py"], r"--env_file binary: cannot be read \(not UTF-8 text\)"),
    "table missing": (["--rank_table_file=no.json", "train.py"], r"--rank_table_file .*no\.json: "),
    "table no JSON": (["--rank_table_file=plain", "train.py"], r"--rank_table_file .*plain: "),
    "table with a rank twice": (["--worker_num=2", "--rank_table_file=table.json", "train.py"], r"--rank_table_file "),
    "table of another size": (
        ["--worker_num=2", "--rank_table_file=one.json", "train.py"],
        r"--worker_num 2: --rank_table_file .*one\.json says 1 ",
    ),
    "devices": (["--device_target=gpu", "train.py"], r"1 worker but 0 gpu devices visible .*--device_target cpu"),
    "log size": (
        ["--log_max_bytes=big", "train.py"],
        r"--log_max_bytes big: not a size; give bytes, or .* such as 100M",
    ),
    "time at a terminal": (["--log_time", "--interactive", "train.py"], r"a rank's terminal shows all"),
    "terminal of no rank": (
        ["--worker_num=2", "--interactive=2", "train.py"],
        r"--interactive=2: no such rank; the ranks of this job are 0 to 1",
    ),
    "terminal of no number": (["--interactive=one", "train.py"], r"--interactive: 'one': give the number of a rank"),
    "terminal in the background": (
        ["--interactive", "--join=False", "train.py"],
        r"--interactive=0 and --join=False: ",
    ),
    "terminal of several": (
        ["--worker_num=2", "--local_worker_num=1", "--master_addr=10.0.0.1", "--interactive", "train.py"],
        r"--interactive=0: for a job on this host alone",
    ),
    "warm servers and a script": (["--warm=stop", "train.py"], r"--warm=stop: ends what earlier jobs have left; leave"),
    "warm for no time": (["--warm_time=0", "train.py"], r"--warm_time 0: must be more than 0 seconds"),
    "no signal": (["--signals=USR3", "train.py"], r"--signals USR3: USR3 cannot be passed on \(did you mean USR2"),
    "signal that ends": (["--signals=TERM", "train.py"], r"--signals TERM: TERM cannot be passed on; give none"),
    "cores of no device": (
        ["--worker_num=2", '--bind_core={"device2": ["0"]}', "train.py"],
        r"'device2' is no device here; there are devices 0-1",
    ),
    "cores that are none": (['--bind_core={"device0": ["1000"]}', "train.py"], r"'device0' names CPU 1000, which does"),
    "line break in cores": (['--bind_core={"device0":\n["x"]}', "train.py"], r"'x' is no CPU number"),
    "memory of a file": (["--bind_numa=bind.json", "train.py"], r"--bind_numa: 'bind\.json': give True or False"),
    "host as an option": (["--hosts=-oProxyCommand=id", "train.py"], r"--hosts: '-oProxyCommand=id' starts with '-'"),
    "tail of hosts": (
        ["--hosts=h1:2,h2:2", "--tail_worker_log=4", "train.py"],
        r"--tail_worker_log 4: .*ranks are 0 to 3",
    ),
    "python of hosts": (
        ["--hosts=h1", "--python=python3", "train.py"],
        r"python 'python3' is no absolute path; give the",
    ),
    "value forwarded": (["--hosts=h1", "--forward_env=A=1", "train.py"], r"'A=1': .*--env gives a variable a value"),
    "home forwarded": (["--hosts=h1", "--forward_env=HOME", "train.py"], r"--forward_env HOME: belongs to this host"),
    "SSH to nobody": (["--ssh", "train.py"], r"--ssh: no hosts are given"),
    "logs of hosts in a file": (["--hosts=h1", "--log_dir=plain", "train.py"], r"plain is a file; give a directory"),
    "line break in a name": (["a\nb.py"], r"a\\nb\.py: no such file"),
    "zeros": (["--config=/dev/zero", "train.py"], r"--config /dev/zero: cannot be read .more than 1000000 bytes"),
    "settings of a directory": (["--config=.", "train.py"], r"--config \.: cannot be read \(Is a directory\)"),
    "settings of no file": (["--config=no.yaml", "train.py"], r"--config no\.yaml: cannot be read \(No such file"),
    "check and dry run": (["--check", "--dry_run", "train.py"], r"--check and --dry_run: give one of the two"),
    "words of the script are not ours": (["no.py", "--debug"], r"no\.py: no such file"),
}
GIVE_JOB = "give the --log_dir of a job"
ONE_OF_THREE = "--status LOG_DIR, --stop LOG_DIR and SCRIPT: give one of the three"
STARTED_BEFORE = "shows a job that was started before; give its --status LOG_DIR, too"
OF_COMMANDS = {
    # of what looks at a job that was started before
    "status of nothing": (["--status", "nowhere"], rf"--status \S*/nowhere: no such directory; {GIVE_JOB}"),
    "status of a file": (["--status", "train.py"], rf"--status \S*/train.py: is a file; {GIVE_JOB}"),
    "status of no job": (["--status", "."], rf"--status \S*: no job has used it; {GIVE_JOB}"),
    "stop of no job": (["--stop", "."], rf"--stop \S*: no job has used it; {GIVE_JOB}"),
    "status of a script": (["--status", ".", "train.py"], ONE_OF_THREE),
    "status and stop": (["--status", ".", "--stop", "."], ONE_OF_THREE),
    "status without a value": (["--status"], r"--status: no value after it; msrun --help"),
    "logs of nothing": (["logs"], rf"msrun logs \S*/log_output: no such directory; {GIVE_JOB}"),
    "words of status": (["status", "nowhere"], rf"--status \S*/nowhere: no such directory; {GIVE_JOB}"),
    "rank of logs": (["logs", "--rnk", "0"], r"--rnk: no such option"),
    "watch of nothing": (["--watch"], f"--watch: {STARTED_BEFORE}"),
    "JSON of a script": (["--json", "train.py"], f"--json: {STARTED_BEFORE}"),
    "JSON of nothing": (["--status", "--json"], "--status --json: give the --log_dir of a job after --status"),
    "watch without end": (
        ["--status", ".", "--watch=never"],
        "--watch: 'never': give a number of seconds, 0.1 to 86400",
    ),
    "watch in no time": (["--status", ".", "--watch=0"], "--watch: '0': give a number of seconds, 0.1 to 86400"),
    "watched nothing": (["--status", "nowhere", "--watch"], rf"--status \S*/nowhere: no such directory; {GIVE_JOB}"),
    "trace of nothing": (["trace", "nowhere"], rf"msrun trace \S*/nowhere: no such directory; {GIVE_JOB}"),
    "trace of a file": (["trace", "train.py"], rf"msrun trace \S*/train.py: is a file; {GIVE_JOB}"),
    "trace of no job": (["trace", "."], rf"msrun trace \S*: no job has used it; {GIVE_JOB}"),
    "trace without a value": (["trace"], "Missing argument 'LOG_DIR'; see msrun trace --help"),
}
OF_FILES = {
    # name: (content of wrong.yaml, pattern that the line has to match after the name of the file)
    "file, near miss": (b"grace: 1\nworker_nmu: 4\n", r"wrong\.yaml, line 2: worker_nmu: .*did you mean worker_num\?"),
    "file, no number": (
        b"worker_num: four\n",
        r"wrong\.yaml, line 1: worker_num: 'four': give a number, auto, gpu or cpu",
    ),
    "file, choice": (b"start_method: spawn\n", r"wrong\.yaml, line 1: start_method: 'spawn' is not one of"),
    "file, not UTF-8": (b"log_dir: caf\xe9\n", r"wrong\.yaml: cannot be read \(not UTF-8 text\)"),
    "file, too large": (b"# " + b"x" * 1_000_000, r"wrong\.yaml: cannot be read .more than 1000000 bytes"),
    "file, args alone": (b"args: [a]\n", r"wrong\.yaml, line 1: args: there is no script"),
    "file, version": (b"version: 2\n", r"wrong\.yaml, line 1: version 2: this msrun reads version 1"),
    "file, range": (b"grace: -1\n", r"--grace -1: must be 0 or more .*\(grace is set by wrong\.yaml\)"),
    "file, reserved": (b"env: {RANK: 3}\n", r"--env RANK: msrun sets it .*\(env is set by wrong\.yaml\)"),
    "file, script": (b"script: trian.py\n", r"trian\.py: no such file in .*did you mean train\.py\?"),
}
WITHOUT_SCRIPT = ("file, script", "file, args alone")
OF_VARIABLES = {
    # name: (variables, pattern that the line has to match)
    "variable": ({"MSRUN_GRACE": "abc"}, r"MSRUN_GRACE=abc: 'abc' is not a valid float"),
    "variable truth": ({"MSRUN_QUIET": "perhaps"}, r"MSRUN_QUIET=perhaps: 'perhaps': give True or False"),
    "variable quotes": ({"MSRUN_ENV": "API_KEY='hunter2"}, r"MSRUN_ENV: a quote in it does not close"),
    "variable misspelled": ({"MSRUN_WORKER_NMU": "2"}, r"MSRUN_WORKER_NMU: .*did you mean MSRUN_WORKER_NUM\?"),
}


@pytest.fixture
def cwd(tmp_path):
    """A directory with a script that would leave a trace, and the files that the table above names."""
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "plain").chmod(0o644)
    (tmp_path / "folder").mkdir()
    (tmp_path / "tls.json").write_text('{"client_cert_path": "a", "ca_cert_path": "b"}')
    (tmp_path / "bad.env").write_text("A=1\nno sign\n")
    (tmp_path / "binary").write_bytes(b"A=\xff\n")
    two, one = (encode_table(build_table([("127.0.0.1", count)])) for count in (2, 1))
    (tmp_path / "table.json").write_text(two.replace('"rank_id": "1"', '"rank_id": "0"'))
    (tmp_path / "one.json").write_text(one)
    return tmp_path


def listing(folder):
    return sorted(os.listdir(folder))


DRY_RUN_EXCEPTIONS = {"log dir cannot be made", "TLS file", "dry run", "option without its value"}
"""What only an attempt can show, and what takes away the option itself."""
REFUSALS = [("run", name) for name in (*WRONG, *OF_COMMANDS, *OF_FILES, *OF_VARIABLES)]
DRY_RUNS = [("dry run", name) for name in WRONG if name not in DRY_RUN_EXCEPTIONS]
FAST = [f"run/{name}" for _, name in REFUSALS] + ["dry run/missing script", "dry run/env rank", "dry run/devices"]


@pytest.mark.parametrize(("how", "name"), slow_but(FAST, REFUSALS + DRY_RUNS))
def test_wrong_input_is_refused_in_one_line(msrun_here, cwd, how, name):
    given, pattern = {**WRONG, **OF_COMMANDS, **OF_FILES, **OF_VARIABLES}[name]
    arguments, env = (given, {}) if isinstance(given, list) else (["train.py"], given)
    if isinstance(given, bytes):
        (cwd / "wrong.yaml").write_bytes(given)
        arguments, env = ["--config=wrong.yaml", *([] if name in WITHOUT_SCRIPT else ["train.py"])], {}
        pattern = f"--config {pattern}" if pattern.startswith("wrong") else pattern
    before = listing(cwd)
    finished = msrun_here(*(["--dry_run"] if how == "dry run" else []), *arguments, cwd=cwd, env=env)
    assert finished.code == 2, finished.stderr
    assert finished.stderr.count("\n") == 1
    assert finished.stderr.startswith("msrun: error: ")
    assert re.search(pattern, finished.stderr), finished.stderr
    assert "hunter2" not in finished.stderr
    assert finished.stdout == b""
    assert listing(cwd) == before


@pytest.mark.parametrize("name", one_fast("missing script", "table with a rank twice"))
def test_own_process_ends_with_the_same_line(msrun, msrun_here, cwd, name):
    assert msrun.run(*WRONG[name][0], cwd=cwd) == msrun_here(*WRONG[name][0], cwd=cwd)


@pytest.mark.parametrize("where", ["--join=True", "--join=False"])
def test_port_in_use_is_named_with_its_address_and_its_owner(msrun, cwd, where):
    before = listing(cwd)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finished = msrun.run(where, f"--master_port={port}", "train.py", cwd=cwd)
    assert finished.code == 2
    (line,) = finished.stderr.splitlines()
    assert f"--master_port {port}: cannot listen on 127.0.0.1:{port} (Address already in use)" in line
    assert f", taken by pid {os.getpid()} (" in line
    assert listing(cwd) == before


@pytest.mark.slow
def test_file_that_may_not_grow_is_reported_and_the_job_ends(msrun, tmp_path):
    none = msrun.run("--worker_num=1", WORKERS / "flood.py", "10", cwd=tmp_path, prefix=["prlimit", "--fsize=1000"])
    assert none.code == 2 and "File too large" in none.stderr
    few = ["prlimit", "--fsize=50000"]
    some = msrun.run("--worker_num=2", WORKERS / "flood.py", "100000", cwd=tmp_path, prefix=few)
    assert some.code in (1, 120) and "failed first" in some.stderr


@pytest.mark.parametrize("words", one_fast(["--dry_run", "train.py"], ["--stop=logs"]))
def test_current_directory_that_has_been_removed_is_named(msrun, tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    finished = msrun.run(*words, cwd=gone, prefix=["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh"])
    assert (finished.code, len(finished.errors)) == (2, 1)
    assert "the current directory has been removed; change to one that exists" in finished.stderr
