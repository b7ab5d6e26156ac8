"""Entry point: `python -m services.prefill serve`, or the folder as a program, `python services/prefill serve`."""

import sys
from pathlib import Path

if not __package__:
    # The folder itself leads the path then, and its modules would answer to bare names such as `servicer`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from core.types import Stage
from services.runtime import main

if __name__ == "__main__":
    main(Stage.PREFILL)
