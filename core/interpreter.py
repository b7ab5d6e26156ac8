"""How the threads of an engine's process share Python's interpreter lock."""

from __future__ import annotations

import sys

#: A thread that runs Python code lets go of the lock after so long if another one wants it. Python's own default, five
#: milliseconds, is a fifth of a decode step, which is what a burst of look-ups or reports in the background would cost
#: the step thread each time. Shorter ones cost more in changing threads than they save.
SWITCH_INTERVAL_S = 0.0005


def share_lock_often() -> None:
    """For all threads of this process, from now on."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
