import importlib
import json
import sys

print(importlib.reload(json) is json)
del sys.modules["json"], sys.modules["json.decoder"]
import json as again  # noqa: E402

print(again is json, again.loads("[1]"))
