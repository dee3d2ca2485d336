import os
import tempfile

folder = tempfile.TemporaryDirectory(dir=".", prefix="kept")
named = tempfile.NamedTemporaryFile(dir=".", prefix="named")  # noqa: SIM115
print(len(os.listdir(".")))
