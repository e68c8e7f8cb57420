"""A rank that is told to end saves for 2 s, and counts the signals that came."""

import os
import signal
import time

import meshlib as dist

dist.init_process_group(timeout=60)
counts = {}


def told(number, frame):
    counts[number] = counts.get(number, 0) + 1


signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGUSR1, told)
dist.barrier()
print(f"ready {dist.get_rank()}", flush=True)
until = time.monotonic() + 60
while signal.SIGTERM not in counts and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(2)  # it saves; a second SIGTERM would come now
with open(f"saved.{dist.get_rank()}", "w") as file:
    file.write(f"{counts.get(signal.SIGTERM, 0)} {counts.get(signal.SIGUSR1, 0)}")
os._exit(0)
