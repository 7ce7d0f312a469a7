"""Write one line when a process imports this module, so that the processes of a run can be counted."""

import os
from pathlib import Path

with Path(os.environ["BOTH_WAYS_IMPORTS"]).open("a") as imports:
    imports.write(f"{os.getpid()}\n")
