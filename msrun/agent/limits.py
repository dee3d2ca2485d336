"""How long the agent waits for its own processes before it takes them for lost. In seconds."""

from __future__ import annotations

OVERDUE_S = 3.0
"""How long past its grace a stop may take before the fork server itself is killed."""
SWEEP_OVERDUE_S = 10.0
"""How long the fork server may take to end what an attempt left behind."""
LOOKS_PER_LIMIT = 4
"""How often to look, within the time that a process of msrun's own may be stopped, whether one is."""
STORE_OVERDUE_S = 10.0
"""How long the scheduler may take for that."""
SCHEDULER_END_S = 3.0
"""How long the scheduler may take to end by itself once its channel is closed: for its last lines."""
