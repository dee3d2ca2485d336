"""The Python text that an agent's interpreter runs: its environment, where msrun is, and what of it to start."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SHIPPED_PACKAGES = ("msrun", "ranktable")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""The same code is the same archive."""

_ENVIRONMENT = """\
import os,sys
os.environ.update({environment})
sys.path[:0]=[p for p in os.environ.get("PYTHONPATH","").split(os.pathsep) if p and p not in sys.path]
"""

# A file that is there already is trusted only if it is what was sent, in a folder of the user's own, which nobody else
# may write. Where the home folder cannot be written, the one in the temporary folder is used again.
_SHIPPED = """\
import base64,hashlib,stat,tempfile
z=base64.b64decode("{archive}")
def keep(folder):
    os.makedirs(folder,mode=0o700,exist_ok=True)
    path=os.path.join(folder,"msrun-{digest}.zip")
    try:
        with open(path,"rb") as f: good=f.read()==z
    except OSError: good=False
    if not good:
        number,new=tempfile.mkstemp(dir=folder)
        try:
            with open(number,"wb") as f: f.write(z)
            os.replace(new,path)
        except OSError:
            os.unlink(new)
            raise
    return path
def own(folder):
    try: os.mkdir(folder,0o700)
    except FileExistsError: pass
    found=os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid==os.geteuid() and not found.st_mode&0o022: return folder
    return tempfile.mkdtemp(prefix="msrun-code-")
try: p=keep(os.path.join(os.path.expanduser("~"),".cache","msrun"))
except OSError: p=keep(own(os.path.join(tempfile.gettempdir(),"msrun-code-%d"%os.geteuid())))
sys.path.insert(0,p)
os.environ["PYTHONPATH"]=os.pathsep.join([p]+[q for q in os.environ.get("PYTHONPATH","").split(os.pathsep) if q])
"""

# The name msrun is that of our package, whatever PYTHONPATH holds of that name.
_OWN = """\
own=[p for p in sys.path if os.path.isfile(os.path.join(p,"msrun","launch","remote","agent.py"))][:1]
sys.path[:0]=own
import msrun
del sys.path[:len(own)]
"""

_START = "from msrun.launch.remote.agent import main\nmain()\n"
_SALVAGE = "from msrun.launch.remote.spool import salvage\nsalvage({job_id!r},{number},{offsets})\n"
_ATTACH = "from msrun.launch.remote.spool import attach\nattach({job_id!r},{number})\n"


@dataclass(frozen=True)
class AgentCode:
    """What an interpreter on the host has to run."""

    start: bytes
    attach: bytes
    """Connects to the agent of a broken connection; empty where that cannot be."""
    salvage: Callable[[], bytes]
    """Sends what a killed agent has left."""


def start_code(environment: Mapping[str, str], shipped: str = "") -> bytes:
    """Return what starts an agent.

    Args:
        environment: variables that the agent's process gets beside those that it has.
        shipped: from `pack_msrun`, for a host without msrun.
    """
    return _prelude(environment, shipped) + _START.encode()


def attach_code(environment: Mapping[str, str], job_id: str, number: int, shipped: str = "") -> bytes:
    """Return what connects to an agent that runs already."""
    return _prelude(environment, shipped) + _ATTACH.format(job_id=job_id, number=number).encode()


def salvage_code(
    environment: Mapping[str, str], job_id: str, number: int, offsets: Mapping[str, int], shipped: str = ""
) -> bytes:
    """Return what brings home the rest of the logs of an agent that was killed; see `remote.spool`."""
    text = _SALVAGE.format(job_id=job_id, number=number, offsets=ascii(dict(offsets)))
    return _prelude(environment, shipped) + text.encode()


def _prelude(environment: Mapping[str, str], shipped: str) -> bytes:
    return (_ENVIRONMENT.format(environment=ascii(dict(environment))) + shipped + _OWN).encode("ascii")


def pack_msrun() -> str:
    """Return the text that makes this launcher's own code importable: as an archive that is kept by its hash."""
    root = Path(__file__).resolve().parents[3]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for package in SHIPPED_PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                name = path.relative_to(root).as_posix().replace(os.sep, "/")
                file.writestr(zipfile.ZipInfo(name, _ZIP_TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = archive.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    return _SHIPPED.format(archive=base64.b64encode(data).decode("ascii"), digest=digest[:32])
