"""Where things lie, and how processes that tests start are begun."""

import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ROOT / "tests" / "planted"
PUBLISHED = ROOT / "sweeps" / "published" / "kernels.csv"
PUBLISHED_OPERATIONS = ROOT / "sweeps" / "published" / "grouped_mm.csv"


def hear_interrupts() -> None:
    """A shell's background jobs, and with them all that the tests start there, are born deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
