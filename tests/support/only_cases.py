"""Which cases of a table a worker runs: those that a chosen test looks at. In asked_cases, every rank would pay
for an import of pytest.
"""

import json
import os

ONLY_CASES = "ONLY_CASES"
"""The keys that a worker runs, as JSON; all when it is not set."""


def is_asked(key):
    """Return, in a worker, whether a chosen test looks at the case of this key."""
    asked = os.environ.get(ONLY_CASES)
    return asked is None or key in json.loads(asked)
