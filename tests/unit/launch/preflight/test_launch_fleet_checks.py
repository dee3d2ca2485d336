"""All that hosts may differ in, in one list; each finding is red where it should be and green where it should not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fleet_reports import LAUNCHER, make_answer, make_answers, make_entries

from msrun.cluster.protocol import Finding, HostAddress, ReachResult
from msrun.errors import ClusterError, MsrunError, RendezvousTimeout, UsageError
from msrun.launch.preflight.finding import exit_code_of_findings, render_fleet_findings
from msrun.launch.preflight.fleet_checks import LauncherFacts, check_reach, clock_skew, compare_hosts
from msrun.launch.preflight.host_report import HostAnswer

Odd = Mapping[int, Mapping[str, Any] | MsrunError]


def look(count: int, odd: Odd | None = None, launcher: LauncherFacts = LAUNCHER) -> tuple[list[str], int]:
    """Return the lines, without double blanks, and the exit code."""
    entries = make_entries(count)
    findings = compare_hosts(entries, make_answers(count, odd), launcher)
    return [" ".join(line.split()) for line in render_fleet_findings(findings, entries)], exit_code_of_findings(
        findings
    )


def test_hosts_that_agree_are_well() -> None:
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


def test_64_hosts_fit_on_a_screen_whatever_is_wrong() -> None:
    odd: dict[int, Any] = {
        node: ClusterError(f"h{node + 1:02}: no answer from 10.0.0.{node}:22") for node in range(20, 40)
    }
    odd |= {node: {"made_at": 1000.2 + node, "received_at": 1000.1 + node} for node in range(40, 60)}
    odd |= {
        node: {"torch_version": "2.12.0", "python_version": "3.12.1", "msrun_version": "0.0.9"} for node in range(10)
    }
    lines, code = look(64, odd)
    assert code == 3 and len(lines) < 20
    assert "fail host h[21-40]: on h21: no answer from 10.0.0.20:22" in lines
    assert (
        "warn clock h[41-60]: clock 39.9 to 58.9 s ahead of the one here: "
        "times in logs do not agree; start chrony or ntpd there" in lines
    )


OTHER_MAIN = (("train.py", "ff00ff00" * 8), ("model.py", "77" * 32))
OTHER_MODEL = (("train.py", "12ab34cd" * 8), ("model.py", "ee11ee11" * 8))
NO_MODEL = (("train.py", "12ab34cd" * 8),)
MORE = (("train.py", "12ab34cd" * 8), ("model.py", "77" * 32), ("extra.py", "aa" * 32))
SAME_INSTALL = "install the same on all hosts"
PYTHON = f"{SAME_INSTALL}, or name another by --python or python= in the hostfile"
COPY = "copy one to all, or use a disk that they share"

FAULTS: list[tuple[Odd, str, int]] = [
    # what is odd at which node of four; the line; exit code
    ({2: ClusterError("h3: refused")}, "fail host h3: refused", 3),
    ({2: RendezvousTimeout("no answer in time")}, "fail host h3: no answer in time", 124),
    ({2: {"python_version": "3.12.1"}}, f"fail python h3 has 3.12.1, the other 3 hosts 3.11.7; {PYTHON}", 3),
    ({2: {"python_version": "3.11.2"}}, "warn python h3 has 3.11.2, the other 3 hosts 3.11.7", 0),
    ({2: {"torch_version": "2.12.1"}}, f"fail torch h3 has 2.12.1, the other 3 hosts 2.13.0+cpu; {SAME_INSTALL}", 3),
    ({2: {"torch_version": ""}}, f"fail torch h3 has none, the other 3 hosts 2.13.0+cpu; {SAME_INSTALL}", 3),
    ({2: {"torch_version": "2.13.0+cu128"}}, "warn torch h3 has 2.13.0+cu128, the other 3 hosts 2.13.0+cpu", 0),
    ({2: {"numpy_version": "1.26.0"}}, f"warn numpy h3 has 1.26.0, the other 3 hosts 2.1.0; {SAME_INSTALL}", 0),
    (
        {2: {"msrun_version": "0.0.9"}},
        "fail msrun h3: msrun 0.0.9 there, 0.1.0 here; install the same version, or send this one along with --ship",
        3,
    ),
    (
        {0: {"msrun_version": ""}},
        "fail msrun h1: msrun unknown there, 0.1.0 here; install the same version, or send this one along with --ship",
        3,
    ),
    (
        {2: {"sources": OTHER_MAIN}},
        f"fail program h3 has another train.py (sha256 ff00ff00) than the other 3 hosts (sha256 12ab34cd); {COPY}",
        2,
    ),
    (
        {2: {"sources": OTHER_MODEL}},
        f"warn program h3 has another model.py (sha256 ee11ee11) than the other 3 hosts (sha256 77777777); {COPY}",
        0,
    ),
    ({1: {"sources": NO_MODEL}}, f"warn program h2 has no model.py, the other 3 hosts one; {COPY}", 0),
    ({1: {"sources": MORE}}, f"warn program h2 has extra.py (sha256 aaaaaaaa), the other 3 hosts none; {COPY}", 0),
    (
        {2: {"architecture": "aarch64"}},
        "warn machine h3 is aarch64, the other 3 hosts x86_64: floating-point results may differ between them",
        0,
    ),
    (
        {2: {"device_target": "gpu"}},
        "fail device_target h3 would use gpu, the other 3 hosts cpu; give --device_target, or leave hosts out",
        2,
    ),
    (
        {2: {"received_at": 1002.0, "made_at": 1002.1}},
        "warn clock h3: clock 1.8 s ahead of the one here: times in logs do not agree; start chrony or ntpd there",
        0,
    ),
    (
        {2: {"received_at": 400.0, "made_at": 400.1}},
        "warn clock h3: clock 600.2 s behind the one here: times in logs do not agree; start chrony or ntpd there",
        0,
    ),
    ({2: {"sees_log_dir": True}}, "ok logs h3: log directory shared with this host: logs are not sent", 0),
    ({2: {"sees_log_dir": True}}, "ok logs h[1-2,4]: logs are sent here while the job runs", 0),
    (
        {2: {"findings": (Finding("fail", "devices", "4 workers but 2 gpu devices visible on machine2", 2),)}},
        "fail devices h3: 4 workers but 2 gpu devices visible on machine2",
        2,
    ),
    (
        {node: {"findings": (Finding("warn", "disk", f"{500 + node} MiB free for logs in /tmp"),)} for node in (1, 3)},
        "warn disk h[2,4]: 501 to 503 MiB free for logs in /tmp",
        0,
    ),
    (
        {0: {"addresses": ()}},
        (
            "fail master_addr h1: no address of it is known that the other hosts "
            "could reach, and it is to run the scheduler; give --master_addr"
        ),
        2,
    ),
]


@pytest.mark.parametrize(("odd", "line", "code"), FAULTS)
def test_odd_host_is_named_with_a_remedy(odd: Odd, line: str, code: int) -> None:
    lines, found = look(4, odd)
    assert line in lines
    assert found == code
    good, _ = look(4)
    assert line not in good


def test_clock_that_is_far_off_keeps_a_host_out_of_a_restart() -> None:
    lines, code = look(4, {2: {"received_at": 400.0, "made_at": 400.1}}, replace(LAUNCHER, is_restart=True))
    assert (lines[0], code) == (
        "fail clock h3: clock 600.2 s behind the one here; start chrony or ntpd there",
        3,
    )
    assert look(4, {2: {"received_at": 1002.0, "made_at": 1002.1}}, replace(LAUNCHER, is_restart=True))[1] == 0


def test_everything_is_found_at_once() -> None:
    odd: Odd = {0: {"torch_version": "2.12.0"}, 1: ClusterError("h2: refused"), 3: {"sources": OTHER_MAIN}}
    lines, code = look(4, odd)
    assert [line.split()[1] for line in lines if line.startswith("fail")] == ["host", "torch", "program"]
    assert code == 2


def test_no_host_at_all_is_one_line_and_no_fault_of_the_checks() -> None:
    lines, code = look(3, {node: ClusterError(f"h{node + 1}: refused") for node in range(3)})
    assert (lines, code) == (["fail host all 3 hosts: refused"], 3)


def test_two_names_of_one_machine_are_refused() -> None:
    same = {"boot_id": "boot-0", "host_name": "machine0", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)}
    lines, code = look(3, {2: same})
    assert code == 2
    assert (
        "fail machine h[1,3]: are one machine, machine0: one agent starts all "
        "workers of a host; name it once, with all slots" in lines
    )


@pytest.mark.parametrize(
    "other",
    [
        {"boot_id": "boot-0", "host_name": "machine0"},  # two namespaces or containers of one machine
        {"boot_id": "boot-0", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)},
        {"host_name": "machine0", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)},  # two machines of one image
    ],
)
def test_what_only_looks_like_one_machine_is_taken(other: dict[str, Any]) -> None:
    lines, code = look(3, {2: other})
    assert code == 0 and not [line for line in lines if " machine " in line]


def test_machines_that_do_not_say_which_boot_they_are_of_are_not_taken_for_one() -> None:
    same = {"boot_id": "", "host_name": "m", "addresses": (HostAddress("10.0.0.1", "eth0", 24),)}
    assert look(2, {0: same, 1: same})[1] == 0


def test_torch_that_is_nowhere_is_left_to_the_hosts_own_warning() -> None:
    lines, code = look(2, {0: {"torch_version": ""}, 1: {"torch_version": ""}})
    assert code == 0 and not [line for line in lines if " torch " in line]


def test_launcher_without_the_program_is_not_compared() -> None:
    assert look(2, launcher=replace(LAUNCHER, sources=()))[1] == 0


def test_program_that_was_changed_here_only_is_told() -> None:
    lines, code = look(2, launcher=replace(LAUNCHER, sources=OTHER_MODEL))
    assert code == 0
    assert (
        "warn program all 2 hosts: the model.py there (sha256 77777777) is "
        "another than the one here (sha256 ee11ee11); "
        "the one there is run" in lines
    )


def test_executable_that_differs_is_a_warning_only() -> None:
    """Hosts may well have different builds of /bin/bash."""
    launcher = replace(LAUNCHER, program=replace(LAUNCHER.program, kind="executable", target="/bin/bash"), sources=())
    odd = {0: {"sources": (("bash", "aa" * 32),)}, 1: {"sources": (("bash", "bb" * 32),)}}
    lines, code = look(2, odd, launcher)
    assert code == 0 and [line for line in lines if line.startswith("warn program h2 has another bash")]


def test_host_without_the_program_has_said_so_itself_and_is_not_compared() -> None:
    odd = {
        1: {"sources": (), "findings": (Finding("fail", "program", "/home/me/train.py: No such file or directory", 2),)}
    }
    lines, code = look(2, odd)
    assert code == 2 and [line for line in lines if " program " in line and line.startswith("fail")] == [
        "fail program h2: /home/me/train.py: No such file or directory"
    ]


SKEWS = [
    # sent, received there, made there, received; least, most
    (100.0, 100.1, 100.2, 100.3, -0.1, 0.1),
    (100.0, 105.1, 105.2, 100.3, 4.9, 5.1),
    (100.0, 95.0, 95.0, 100.0, -5.0, -5.0),
    (100.0, 103.9, 103.9, 104.0, -0.1, 3.9),
]


@pytest.mark.parametrize(("sent", "there", "made", "received", "least", "most"), SKEWS)
def test_clock_is_judged_by_what_the_way_may_have_taken(
    sent: float, there: float, made: float, received: float, least: float, most: float
) -> None:
    answer = make_answer(0, received_at=there, made_at=made)
    assert clock_skew(HostAnswer(answer.report, sent, received)) == (pytest.approx(least), pytest.approx(most))


def test_clock_that_may_be_right_after_a_slow_start_is_not_blamed() -> None:
    entries = make_entries(1)
    answer = HostAnswer(make_answer(0, received_at=1003.9, made_at=1003.9).report, 1000.0, 1004.0)
    lines = render_fleet_findings(compare_hosts(entries, {0: answer}, LAUNCHER), entries)
    assert not [line for line in lines if line.startswith("warn")]


MASTER = UsageError("--master_addr head: cannot be resolved")


def test_name_of_the_scheduler_that_its_host_does_not_know_is_told_once() -> None:
    odd = {0: {"findings": (Finding("fail", "master_addr", str(MASTER), 3),)}}
    lines, code = look(2, odd, replace(LAUNCHER, master_addr="head"))
    assert [line for line in lines if "master_addr" in line] == [f"fail master_addr h1: {MASTER}"]
    assert code == 3


def test_host_whose_addresses_could_not_be_read_is_not_blamed_for_having_none() -> None:
    odd = {0: {"addresses": (), "findings": (Finding("fail", "packages", "psutil not installed", 3),)}}
    lines, code = look(2, odd)
    assert code == 3 and [line for line in lines if line.startswith("fail")] == [
        "fail packages h1: psutil not installed"
    ]


REMEDY = "name the right address by --master_addr, or by address= in the hostfile"
REACHES = [
    (ReachResult(source="10.0.0.3", interface="eth0"), "ok scheduler h3: can reach the scheduler at 10.0.0.1:41233", 0),
    (
        ReachResult("timed out after 3 s", "10.9.0.3", "eth1"),
        (
            "fail scheduler h3: cannot reach the scheduler at 10.0.0.1:41233: "
            "timed out after 3 s; its way there begins at "
            f"10.9.0.3 (eth1): a firewall, or another network; {REMEDY}"
        ),
        3,
    ),
    (
        ReachResult("network is unreachable"),
        (
            "fail scheduler h3: cannot reach the scheduler at 10.0.0.1:41233: "
            "network is unreachable; it has no route there: "
            f"another network; {REMEDY}"
        ),
        3,
    ),
    (
        ReachResult("refused", "10.0.0.1", "docker0", is_own=True),
        (
            "fail scheduler h3: cannot reach the scheduler at 10.0.0.1:41233: "
            "refused; 10.0.0.1 is its own address, too, on "
            f"docker0: no network of all hosts; {REMEDY}"
        ),
        3,
    ),
]


@pytest.mark.parametrize(("result", "line", "code"), REACHES)
def test_host_that_cannot_reach_the_scheduler_says_over_which_way(result: ReachResult, line: str, code: int) -> None:
    entries = make_entries(3)
    findings = check_reach(entries, {1: ReachResult(source="10.0.0.2", interface="eth0"), 2: result}, "10.0.0.1", 41233)
    lines = [" ".join(text.split()) for text in render_fleet_findings(findings, entries)]
    assert line.replace("h3", "h[2-3]") in lines if code == 0 else line in lines
    assert exit_code_of_findings(findings) == code


def test_ipv6_place_is_written_in_brackets() -> None:
    (finding,) = check_reach(make_entries(2), {1: ReachResult()}, "fd77::9", 80)
    assert "[fd77::9]:80" in finding.text
