import os
import signal
import time

import numpy as np

import meshlib as dist


def handler(*_):
    try:
        dist.barrier()
    except dist.DistBackendError as error:
        errors.append(str(error))


errors = []
dist.init_process_group()
x = np.ones(4)
for _ in range(3):
    dist.all_reduce(x)  # from the second on in compiled code
if dist.get_rank() == 0:
    signal.signal(signal.SIGUSR1, handler)
    open(f"pid-{os.getpid()}", "w").close()
    dist.all_reduce(x)
    assert len(errors) == 1, errors
    assert "barrier on" in errors[0] and "all_reduce" in errors[0], errors
else:
    while not (pids := [name for name in os.listdir() if name.startswith("pid-")]):
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(int(pids[0][4:]), signal.SIGUSR1)
    time.sleep(0.2)
    dist.all_reduce(x)
assert x.tolist() == [16.0] * 4
