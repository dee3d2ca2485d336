"""All that hosts may differ in, in one list; each finding is red where it should be and green where it should not."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_reports import LAUNCHER, make_answer, make_answers, make_entries
from plans import small_spec

from msrun.cluster.host_report import Finding, HostAddress, ReachResult
from msrun.errors import ClusterError, MsrunError, RendezvousTimeout, UsageError
from msrun.launch.fleet.hosts import inspect_launcher
from msrun.launch.preflight.fleet_checks import (
    HostAnswer,
    check_reach,
    clock_skew,
    compare_hosts,
    describe_finding,
    exit_code_of_findings,
    find_majority,
    fleet_error,
    fold_findings,
    name_hosts,
    order_findings,
    render_finding,
    render_fleet_findings,
)
from msrun.planning.hosts import HostEntry

Odd = Mapping[int, Mapping[str, Any] | MsrunError]


def look(count, odd=None, launcher=LAUNCHER):
    """Return the lines, without double blanks, and the exit code."""
    entries = make_entries(count)
    findings = compare_hosts(entries, make_answers(count, odd), launcher)
    lines = [" ".join(line.split()) for line in render_fleet_findings(findings, entries)]
    return lines, exit_code_of_findings(findings)


def test_hosts_that_agree_are_well():
    lines, code = look(4)
    assert code == 0
    assert lines == [
        "ok host all 4 hosts: reached",
        "ok memory all 4 hosts: 60.5 to 63.5 GiB free, 15.1 GiB for each of 4 workers",
        "ok python all 4 hosts: 3.11.7",
        "ok torch all 4 hosts: 2.13.0+cpu",
        "ok msrun all 4 hosts: 0.1.0",
        "ok program all 4 hosts: script /home/me/train.py and 1 module beside it: the same (sha256 12ab34cd)",
        "ok clock all 4 hosts: clock agrees with the one here to 1 s",
        "ok logs all 4 hosts: logs are sent here while the job runs",
        "ok master_addr the scheduler is to listen at 10.0.0.1 of h1 (by which it was reached from here)",
    ]


def test_64_hosts_fit_on_a_screen_whatever_is_wrong():
    odd = {node: ClusterError(f"h{node + 1:02}: no answer from 10.0.0.{node}:22") for node in range(20, 40)}
    odd |= {node: {"made_at": 1000.2 + node, "received_at": 1000.1 + node} for node in range(40, 60)}
    odd |= {
        node: {"torch_version": "2.12.0", "python_version": "3.12.1", "msrun_version": "0.0.9"} for node in range(10)
    }
    lines, code = look(64, odd)
    assert code == 3 and len(lines) < 20
    assert "fail host h[21-40]: on h21: no answer from 10.0.0.20:22" in lines
    assert any(line.startswith("warn clock h[41-60]: clock 39.9 to 58.9 s ahead of the one here: ") for line in lines)


OTHER_MAIN = (("train.py", "ff00ff00" * 8), ("model.py", "77" * 32))
OTHER_MODEL = (("train.py", "12ab34cd" * 8), ("model.py", "ee11ee11" * 8))
NO_MODEL = (("train.py", "12ab34cd" * 8),)
MORE = (("train.py", "12ab34cd" * 8), ("model.py", "77" * 32), ("extra.py", "aa" * 32))
NO_DEVICES = Finding("fail", "devices", "4 workers but 2 gpu devices visible on machine2", 2)
NO_PROGRAM = Finding("fail", "program", "/home/me/train.py: No such file or directory", 2)
NO_PACKAGE = Finding("fail", "packages", "psutil not installed", 3)
SLOW_DISKS = {
    node: {"findings": (Finding("warn", "disk", f"{500 + node} MiB free for logs in /tmp"),)} for node in (1, 3)
}

FAULTS = [
    # what is odd at which node of four; the begin of the line; exit code
    ({2: ClusterError("h3: refused")}, "fail host h3: refused", 3),
    ({node: ClusterError(f"h{node + 1}: refused") for node in range(4)}, "fail host all 4 hosts: refused", 3),
    ({2: RendezvousTimeout("no answer in time")}, "fail host h3: no answer in time", 124),
    ({2: {"python_version": "3.12.1"}}, "fail python h3 has 3.12.1, the other 3 hosts 3.11.7; install the same on ", 3),
    ({2: {"python_version": "3.11.2"}}, "warn python h3 has 3.11.2, the other 3 hosts 3.11.7", 0),
    (
        {2: {"torch_version": "2.12.1"}},
        "fail torch h3 has 2.12.1, the other 3 hosts 2.13.0+cpu; install the same on",
        3,
    ),
    ({2: {"torch_version": ""}}, "fail torch h3 has none, the other 3 hosts 2.13.0+cpu; install the same on all", 3),
    ({2: {"torch_version": "2.13.0+cu128"}}, "warn torch h3 has 2.13.0+cu128, the other 3 hosts 2.13.0+cpu", 0),
    ({2: {"numpy_version": "1.26.0"}}, "warn numpy h3 has 1.26.0, the other 3 hosts 2.1.0; install the same on all", 0),
    ({2: {"msrun_version": "0.0.9"}}, "fail msrun h3: msrun 0.0.9 there, 0.1.0 here; install the same version, or ", 3),
    (
        {0: {"msrun_version": ""}},
        "fail msrun h1: msrun unknown there, 0.1.0 here; install the same version, or send ",
        3,
    ),
    ({2: {"sources": OTHER_MAIN}}, "fail program h3 has another train.py (sha256 ff00ff00) than the other 3 hosts", 2),
    ({2: {"sources": OTHER_MODEL}}, "warn program h3 has another model.py (sha256 ee11ee11) than the other 3 hosts", 0),
    (
        {1: {"sources": NO_MODEL}},
        "warn program h2 has no model.py, the other 3 hosts one; copy one to all, or use a ",
        0,
    ),
    ({1: {"sources": MORE}}, "warn program h2 has extra.py (sha256 aaaaaaaa), the other 3 hosts none; copy one to", 0),
    (
        {2: {"architecture": "aarch64"}},
        "warn machine h3 is aarch64, the other 3 hosts x86_64: floating-point results ",
        0,
    ),
    (
        {2: {"device_target": "gpu"}},
        "fail device_target h3 would use gpu, the other 3 hosts cpu; give --device_target",
        2,
    ),
    (
        {2: {"received_at": 1002.0, "made_at": 1002.1}},
        "warn clock h3: clock 1.8 s ahead of the one here: times in l",
        0,
    ),
    (
        {2: {"received_at": 400.0, "made_at": 400.1}},
        "warn clock h3: clock 600.2 s behind the one here: times in logs",
        0,
    ),
    ({2: {"sees_log_dir": True}}, "ok logs h3: log directory shared with this host: logs are not sent", 0),
    ({2: {"sees_log_dir": True}}, "ok logs h[1-2,4]: logs are sent here while the job runs", 0),
    ({2: {"findings": (NO_DEVICES,)}}, "fail devices h3: 4 workers but 2 gpu devices visible on machine2", 2),
    (SLOW_DISKS, "warn disk h[2,4]: 501 to 503 MiB free for logs in /tmp", 0),
    (
        {0: {"addresses": ()}},
        "fail master_addr h1: no address of it is known that the other hosts could reach, and ",
        2,
    ),
    # what follows from another finding is not told
    ({1: {"sources": (), "findings": (NO_PROGRAM,)}}, f"fail program h2: {NO_PROGRAM.text}", 2),
    ({0: {"addresses": (), "findings": (NO_PACKAGE,)}}, "fail packages h1: psutil not installed", 3),
]


@pytest.mark.parametrize(("odd", "line", "code"), FAULTS)
def test_odd_host_is_named_with_a_remedy(odd, line, code):
    lines, found = look(4, odd)
    assert sum(text.startswith(line) for text in lines) == 1
    assert found == code
    assert sum(text.startswith("fail") for text in lines) == (code > 0)
    good, _ = look(4)
    assert not any(text.startswith(line) for text in good)


def test_clock_that_is_far_off_keeps_a_host_out_of_a_restart():
    lines, code = look(4, {2: {"received_at": 400.0, "made_at": 400.1}}, replace(LAUNCHER, is_restart=True))
    assert code == 3
    assert lines[0] == "fail clock h3: clock 600.2 s behind the one here; start chrony or ntpd there"
    assert look(4, {2: {"received_at": 1002.0, "made_at": 1002.1}}, replace(LAUNCHER, is_restart=True))[1] == 0


def test_two_names_of_one_machine_are_refused():
    same = {"boot_id": "boot-0", "host_name": "machine0", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)}
    lines, code = look(3, {2: same})
    assert code == 2
    assert any(line.startswith("fail machine h[1,3]: are one machine, machine0: one agent starts") for line in lines)


EQUAL_MACHINE = {"boot_id": "", "host_name": "m", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)}


@pytest.mark.parametrize(
    "odd",
    [
        {2: {"boot_id": "boot-0", "host_name": "machine0"}},  # two namespaces or containers of one machine
        {2: {"boot_id": "boot-0", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)}},
        {2: {"host_name": "machine0", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)}},  # of one image
        {0: EQUAL_MACHINE, 2: EQUAL_MACHINE},  # which do not say which boot they are of
        {node: {"torch_version": ""} for node in range(3)},  # is left to the hosts' own warning
    ],
)
def test_what_only_looks_like_one_machine_or_is_missing_everywhere_is_taken(odd):
    lines, code = look(3, odd)
    assert code == 0 and not [line for line in lines if " machine " in line or line.startswith("warn")]


def test_program_is_compared_with_the_one_here_if_there_is_one():
    assert look(2, launcher=replace(LAUNCHER, sources=()))[1] == 0
    lines, code = look(2, launcher=replace(LAUNCHER, sources=OTHER_MODEL))
    there = "warn program all 2 hosts: the model.py there (sha256 77777777) is another than the one here (sha256 ee11"
    assert code == 0 and any(line.startswith(there) for line in lines)
    lines, _ = look(3, {1: {"sources": MORE}}, replace(LAUNCHER, sources=MORE))
    assert not any("than the one here" in line for line in lines), "most hosts have none"


def test_executable_that_differs_is_a_warning_only():
    """Hosts may well have different builds of /bin/bash."""
    launcher = replace(LAUNCHER, program=replace(LAUNCHER.program, kind="executable", target="/bin/bash"), sources=())
    odd = {0: {"sources": (("bash", "aa" * 32),)}, 1: {"sources": (("bash", "bb" * 32),)}}
    lines, code = look(2, odd, launcher)
    assert code == 0 and [line for line in lines if line.startswith("warn program h2 has another bash")]


SKEWS = [
    # sent, received there, made there, received; least, most
    (100.0, 100.1, 100.2, 100.3, -0.1, 0.1),
    (100.0, 105.1, 105.2, 100.3, 4.9, 5.1),
    (100.0, 95.0, 95.0, 100.0, -5.0, -5.0),
    (100.0, 103.9, 103.9, 104.0, -0.1, 3.9),
]


@pytest.mark.parametrize(("sent", "there", "made", "received", "least", "most"), SKEWS)
def test_clock_is_judged_by_what_the_way_may_have_taken(sent, there, made, received, least, most):
    answer = make_answer(0, received_at=there, made_at=made)
    assert clock_skew(HostAnswer(answer.report, sent, received)) == (pytest.approx(least), pytest.approx(most))


MASTER = UsageError("--master_addr head: cannot be resolved")


def test_name_of_the_scheduler_that_its_host_does_not_know_is_told_once():
    odd = {0: {"findings": (Finding("fail", "master_addr", str(MASTER), 3),)}}
    lines, code = look(2, odd, replace(LAUNCHER, master_addr="head"))
    assert [line for line in lines if "master_addr" in line] == [f"fail master_addr h1: {MASTER}"]
    assert code == 3


WRONG_WAY = "fail scheduler h3: cannot reach the scheduler at 10.0.0.1:41233: "
REACHES = [
    (
        ReachResult(source="10.0.0.3", interface="eth0"),
        "ok scheduler h[2-3]: can reach the scheduler at 10.0.0.1:41",
        0,
    ),
    (ReachResult("timed out", "10.9.0.3", "eth1"), "timed out; its way there begins at 10.9.0.3 (eth1): a firewall", 3),
    (ReachResult("network is unreachable"), "network is unreachable; it has no route there: another network; name", 3),
    (ReachResult("refused", "10.0.0.1", "docker0", is_own=True), "refused; 10.0.0.1 is its own address, too, on do", 3),
]


@pytest.mark.parametrize(("result", "text", "code"), REACHES)
def test_host_that_cannot_reach_the_scheduler_says_over_which_way(result, text, code):
    entries = make_entries(3)
    findings = check_reach(entries, {1: ReachResult(source="10.0.0.2", interface="eth0"), 2: result}, "10.0.0.1", 41233)
    lines = [" ".join(text.split()) for text in render_fleet_findings(findings, entries)]
    assert any(line.startswith(f"{WRONG_WAY if code else ''}{text}") for line in lines)
    assert exit_code_of_findings(findings) == code


def test_ipv6_place_is_written_in_brackets():
    (finding,) = check_reach(make_entries(2), {1: ReachResult()}, "fd77::9", 80)
    assert "[fd77::9]:80" in finding.text


SIXTEEN = make_entries(16)

FOLDS = [
    # node -> text; lines
    ({0: "same", 1: "same", 2: "same"}, ["h[01-03]: same"]),
    (dict.fromkeys(range(16), "same"), ["all 16 hosts: same"]),
    ({0: "same", 1: "other", 2: "same"}, ["h[01,03]: same", "h02: other"]),
    ({0: "41.2 GiB free", 1: "9.9 GiB free", 2: "41.2 GiB free"}, ["h[01-03]: 9.9 to 41.2 GiB free"]),
    ({0: "5 of 8 ok", 1: "6 of 8 ok"}, ["h[01-02]: 5 to 6 of 8 ok"]),
    ({0: "7 GiB free", 1: "512 MiB free"}, ["h01: 7 GiB free", "h02: 512 MiB free"]),
    ({0: "no /disk1", 1: "no /disk2"}, ["h[01-02]: on h01: no /disk1"]),
    ({0: "2.13.0", 1: "2.12.1"}, ["h[01-02]: on h01: 2.13.0"]),
    ({0: "h01: refused", 1: "h02: refused"}, ["h[01-02]: refused"]),
    ({0: "key of h01 is wrong", 1: "key of h02 is wrong"}, ["h[01-02]: key of the host is wrong"]),
    ({4: "key of h05 is wrong"}, ["h05: key of h05 is wrong"]),
    ({4: "h05 (10.0.0.5 port 22): refused"}, ["h05 (10.0.0.5 port 22): refused"]),
    ({4: "h05 (10.0.0.5): refused", 5: "h06 (10.0.0.6): refused"}, ["h[05-06]: such as h05 (10.0.0.5): refused"]),
    ({0: "10.0.0.1 refused", 1: "10.0.0.2 refused"}, ["h[01-02]: on h01: 10.0.0.1 refused"]),
    ({0: "h010 is no h01", 1: "h010 is no h02"}, ["h[01-02]: h010 is no the host"]),
]


@pytest.mark.parametrize(("texts", "lines"), FOLDS)
def test_equal_findings_are_one_line(texts, lines):
    folded = fold_findings(((node, Finding("warn", "x", text)) for node, text in texts.items()), SIXTEEN)
    assert [describe_finding(finding, SIXTEEN) for finding in folded] == lines


def test_findings_that_differ_in_more_than_text_stay_apart():
    said = [Finding(status, "a", "x", code) for status, code in (("ok", 0), ("warn", 0), ("fail", 2), ("fail", 3))]
    assert len(fold_findings(enumerate(said), SIXTEEN)) == 4


NAMES = [
    (["h1"], [0], "h1"),
    (["h1", "h2"], [0, 1], "all 2 hosts"),
    (["a", "b", "c"], [0, 2], "a,c"),
    ([f"node{number:04}" for number in range(64)], range(1, 64), "node[0001-0063]"),
    ([f"node{number}" for number in range(128)], range(0, 128, 2), "node0, node2, node4 and 61 more hosts"),
    ([f"10.0.0.{number}" for number in range(1, 9)], range(4), "10.0.0.[1-4]"),
]


@pytest.mark.parametrize(("names", "nodes", "text"), NAMES)
def test_hosts_are_named_in_few_words(names, nodes, text):
    assert name_hosts(list(nodes), [HostEntry(name, 1, (0,)) for name in names]) == text


def test_failures_come_first_and_quiet_leaves_out_what_is_well():
    fault = Finding("fail", "disk", "the disk is full", 2, (3,))
    findings = [Finding("ok", "memory", "5 GiB free", nodes=(0, 1)), Finding("warn", "torch", "h01 has 2.12.0"), fault]
    assert render_fleet_findings(order_findings(findings), SIXTEEN) == [
        "fail  disk           h04: the disk is full",
        "warn  torch          h01 has 2.12.0",
        "ok    memory         h[01-02]: 5 GiB free",
    ]
    assert len(render_fleet_findings(findings, SIXTEEN, quiet=True)) == 2


def test_line_of_a_hostile_host_stays_one_line():
    (line,) = render_fleet_findings([Finding("warn", "x", "a\nok    y              b", nodes=(0,))], SIXTEEN)
    assert "\n" not in line
    assert render_finding(Finding("ok", "disk", "a\nb\rc")) == "ok    disk           a\\nb\\rc"


def test_error_of_a_run_is_the_first_failure_and_counts_the_others():
    host = Finding("fail", "host", "h02: connection refused", 3)
    disk = Finding("fail", "disk", "the disk is full", 2, (3, 4))
    assert fleet_error([Finding("warn", "x", "y")], SIXTEEN) is None
    error = fleet_error([host], SIXTEEN)
    assert isinstance(error, ClusterError) and (str(error), error.exit_code) == ("h02: connection refused", 3)
    error = fleet_error([host, disk], SIXTEEN)
    assert isinstance(error, UsageError)
    assert (str(error), error.exit_code) == ("h[04-05]: the disk is full (and 1 more; --check shows all)", 2)
    late = fleet_error([Finding("fail", "host", "no answer in time", 124, (1,))], SIXTEEN)
    assert late is not None and late.exit_code == 124


def test_exit_code_is_that_of_what_the_user_has_to_change_first():
    assert exit_code_of_findings([Finding("ok", "x", ""), Finding("warn", "x", "")]) == 0
    assert exit_code_of_findings([Finding("fail", "x", "", 3), Finding("fail", "x", "", 2)]) == 2


@pytest.mark.parametrize(
    ("letters", "text"),
    [
        ("aabb", "h[3-4] have b, the other 2 hosts a"),
        ("ab", "h2 has b, h1 a"),
        ("aabcdefg", "h3 has b, h4 has c, h5 has d, 3 more have others, the other 2 hosts a"),
    ],
)
def test_odd_hosts_are_named(letters, text):
    found = find_majority(dict(enumerate(letters)))
    assert found.odd and found.describe(make_entries(len(letters))) == text


def test_log_directory_here_is_looked_at_and_not_made(tmp_path):
    findings = inspect_launcher(small_spec(Path("/"), 2, log_dir=tmp_path / "logs"), {})
    assert [finding.name for finding in findings] == ["log_dir", "disk"]
    assert all(finding.status in ("ok", "warn") for finding in findings)
    assert all(finding.text.startswith("here: ") and not finding.nodes for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_log_directory_that_cannot_be_one_fails(tmp_path):
    (tmp_path / "file").touch()
    first = inspect_launcher(small_spec(Path("/"), 2, log_dir=tmp_path / "file"), {})[0]
    assert (first.status, first.exit_code) == ("fail", 2)
    assert "is a file; give a directory" in first.text
