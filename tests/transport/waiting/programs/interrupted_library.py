"""Functions of a library in which Ctrl-C comes."""

import signal

done = []


def interrupted():
    signal.raise_signal(signal.SIGINT)
    done.append("went on")
    return 5


def deeper(function):
    try:
        return interrupted()
    finally:
        done.append("cleaned up")


def fails():
    signal.raise_signal(signal.SIGINT)
    raise ValueError


def twice():
    interrupted()
    interrupted()


def call(function, *args):
    return function(*args)


def within():
    interrupted()
    yield
