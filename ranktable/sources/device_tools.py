"""Asks hccn_tool and npu-smi on this host, each question with a time limit. The only place that starts programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ranktable.errors import SourceError
from ranktable.sources.answer import HostAnswers, Said, check_device_address
from ranktable.sources.captures import join_super_pod, parse_spod_info, read_address

TIME_LIMIT_S = 10.0
_HOMES = {
    "hccn_tool": ("usr/local/Ascend/driver/tools/hccn_tool", "usr/bin/hccn_tool"),
    "npu-smi": ("usr/local/sbin/npu-smi", "usr/local/bin/npu-smi", "usr/local/Ascend/driver/tools/npu-smi"),
}
_DIES_PER_CARD = 2


@dataclass(frozen=True, slots=True)
class DeviceTools:
    """Where to look for the tools, and how long to wait for one answer."""

    root: Path = Path("/")
    search_path: str | None = None
    """Folders separated by colons; None means PATH. Then the places where the driver installs the tools."""
    time_limit_s: float = TIME_LIMIT_S

    def find(self, name: str) -> str | None:
        """Return the path of a tool, None when this host has none."""
        found = shutil.which(name, path=self.search_path)
        homes = (str(self.root / home) for home in _HOMES[name])
        return found or next((home for home in homes if os.access(home, os.X_OK) and Path(home).is_file()), None)

    def ask_addresses(self, device_ids: Iterable[int]) -> HostAnswers | None:
        """Return what hccn_tool says of each device's address, IPv4 or else IPv6; None without the tool.

        Raises SourceError when the tool cannot be run, gives no answer in time, or gives what is no address.
        """
        tool = self.find("hccn_tool")
        if tool is None:
            return None
        addresses: dict[int, Said] = {}
        failed: dict[int, Said] = {}
        for device_id in device_ids:
            for question in (("-ip", "-g"), ("-ip", "-inet6", "-g")):
                said, is_answer = self._ask_address(tool, device_id, question)
                if is_answer:
                    addresses[device_id] = said
                    break
                failed.setdefault(device_id, said)
        return HostAnswers(addresses, failed=failed)

    def ask_super_pod(self, device_ids: Iterable[int]) -> HostAnswers | None:
        """Return SDIDs and super pod of the devices as npu-smi says; None without the tool. Raises SourceError."""
        tool = self.find("npu-smi")
        if tool is None:
            return None
        joined, silent = join_super_pod((device_id, self._ask_spod(tool, device_id)) for device_id in device_ids)
        return replace(
            joined, notes=(*(f"{_spod_question(number)} tells no super pod" for number in silent), *joined.notes)
        )

    def _ask_spod(self, tool: str, device_id: int) -> tuple[Said, Said] | None:
        question = _spod_question(device_id)
        return parse_spod_info(self._ask([tool, *question.split()[1:]], question), device_id, question)

    def _ask_address(self, tool: str, device_id: int, question: tuple[str, ...]) -> tuple[Said, bool]:
        source = f"hccn_tool -i {device_id} {' '.join(question)}"
        text = self._ask([tool, "-i", str(device_id), *question], source)
        said, is_answer = read_address([(None, line.strip()) for line in text.splitlines()], source, None)
        if is_answer:
            check_device_address(said, device_id)
        return said, is_answer

    def _ask(self, command: list[str], source: str) -> str:
        """Return what the command prints, errors too, whatever its exit status."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be ended with all that it started
            )
        except OSError as error:
            message = f"{command[0]} cannot be started: {(error.strerror or str(error)).lower()}"
            raise SourceError(source, None, message, "check the installation of the driver") from error
        with process:
            try:
                output, _ = process.communicate(timeout=self.time_limit_s)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                message = f"there is no answer within {self.time_limit_s:g} s"
                raise SourceError(source, None, message, "look at the state of the device with npu-smi info") from error
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return output.decode("utf-8", "replace")


def _spod_question(device_id: int) -> str:
    card, chip = divmod(device_id, _DIES_PER_CARD)
    return f"npu-smi info -t spod-info -i {card} -c {chip}"
