"""The folder of a launcher, beside launchers that remove what others have left."""

from __future__ import annotations

import os
import tempfile

from meshlib._launcher.folder import make_folder, remove_abandoned_folders


def test_a_folder_that_another_launcher_removes_at_once_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    really_open, removed = os.open, []

    def open_late(path, flags, **options):
        if not removed:  # nobody holds a lock on it yet
            removed.append(path)
            remove_abandoned_folders("meshrun-")
        return really_open(path, flags, **options)

    monkeypatch.setattr(os, "open", open_late)
    folder = make_folder("meshrun-")
    assert folder.is_dir()
    assert [str(folder)] != removed
