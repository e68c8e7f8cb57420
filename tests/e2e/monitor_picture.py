"""Makes the picture of docs/run/monitor.md.

    python -m tests.e2e.monitor_picture FOLDER docs/pictures/monitor.png

The job's program is FOLDER/train.py, which must not be there; the picture shows that name. Rank 2
of a dp=2, tp=2 mesh is lost, another rank comes in its place, and rank 1 is slow. It needs
Playwright, chromium and Pillow, in an environment as ``make test-browser`` sets up.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

SECONDS_LOOKED_AT = 15
PROGRAM = """\
import os, signal, time
import numpy as np
import meshlib as dist
from parallel.elastic import ElasticMesh

dist.init_process_group()
number = int(os.environ["RANK"])
with ElasticMesh(dist.init_device_mesh(), dim="dp") as elastic:
    for step in elastic.steps({"weights": np.zeros(4)}, 100_000):
        with step as mesh:
            if number == 2 and step.number == 60:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.07 if number == 1 else 0.03)
            mesh["tp"].all_reduce(np.ones(50_000, np.float32))
            mesh["dp"].all_reduce(np.ones(200_000, np.float32))
"""
LAUNCHER = "--monitor", "--mesh", "dp=2,tp=2", "--replace", "1"


def main(folder: Path, picture: Path) -> None:
    """Run the job and take the picture."""
    script = folder / "train.py"
    with script.open("x", encoding="utf-8") as file:
        file.write(PROGRAM)
    command = [sys.executable, "-m", "meshlib", "run", *LAUNCHER, script]
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
            assert job.stderr is not None
            found = re.search(r"http://\S+", job.stderr.readline())
            assert found is not None
            try:
                take(found[0], picture)
            finally:
                job.terminate()
    finally:
        script.unlink()


def take(url: str, picture: Path) -> None:
    """Wait on the page at ``url`` until the job has gone on without its lost rank."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto(url)
        expect(page.locator("#notes")).to_contain_text("epoch 2 has begun", timeout=60_000)
        page.wait_for_timeout(1000 * SECONDS_LOOKED_AT)
        expect(page.locator("#calls")).to_contain_text("train.py", timeout=60_000)
        page.screenshot(path=picture, full_page=True)
    with Image.open(picture) as image:
        image.quantize(64).save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
