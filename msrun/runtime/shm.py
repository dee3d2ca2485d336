"""The older name of `msrun.shm`: importing it registers the backend, too."""

import msrun.shm  # noqa: F401
