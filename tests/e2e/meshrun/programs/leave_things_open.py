"""A program ends with a thread, files, a generator and handlers of its own open."""

import atexit
import os
import sys
import threading
import weakref

import numpy as np

path = os.path.join(sys.argv[1], os.environ["RANK"])
file = open(path + "-unflushed", "w")  # noqa: SIM115 (left open)
file.write("unflushed")


descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)


def write_line(word, write=os.write, descriptor=descriptor):  # globals are gone when it is called
    write(descriptor, word.encode() + b" ")


class Thing:
    def __del__(self):
        write_line("deleted")


def paused():
    try:
        yield
    finally:
        write_line("resumed")


main = threading.main_thread()
thing, other, generator = Thing(), Thing(), paused()
next(generator)
np.of_the_program = 3
weakref.finalize(other, write_line, "finalized")
atexit.register(lambda: write_line("exit" if "numpy" in sys.modules else "too late"))
threading.Thread(target=lambda: (main.join(), write_line("thread"))).start()
sys.stdout.write("unflushed")
