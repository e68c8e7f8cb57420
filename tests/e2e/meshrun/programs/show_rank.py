"""A rank's state at its start: its process, imports, random numbers and files."""

import json
import os
import sys

warm = "numpy" in sys.modules
import random  # noqa: E402

import numpy as np  # noqa: E402

opened = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
opened = [path for path in opened if os.path.exists(path)]  # not the listing's own
print(
    json.dumps(
        {
            "warm": warm,
            "rank": os.environ["RANK"],
            "launcher": os.getppid(),
            "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
            "drawn": [random.random(), float(np.random.random())],
            "threads": len(os.listdir("/proc/self/task")),
            "files": sorted(os.readlink(path).partition(":")[0] for path in opened),
        }
    )
)
