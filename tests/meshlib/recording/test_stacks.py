"""Reading the stack of a thread that runs on meanwhile."""

import gc
import threading

from meshlib._recording.stacks import frames_of, user_stack


def _deep(levels, action):
    return _deep(levels - 1, action) if levels else action()


def test_nothing_is_collected_while_another_threads_frames_are_read():
    main = threading.get_ident()
    collections = []

    def note(phase, _info):
        if threading.current_thread() is reader:
            collections.append(phase)

    def read():
        collections.clear()
        frames = frames_of(main)
        found.append((frames, list(collections)))

    found = []
    reader = threading.Thread(target=read)

    def run():
        reader.start()
        reader.join()

    before = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(3)
        _deep(50, run)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    [(frames, seen)] = found
    assert sum(frame.f_code is _deep.__code__ for frame, _ in frames) == 51
    # One may begin behind the last frame, when collecting is allowed again.
    assert seen in ([], ["start", "stop"])
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        assert user_stack(threading.get_ident())[-1].strip().startswith("assert user_stack(")
        assert not gc.isenabled()
    finally:
        gc.enable()
