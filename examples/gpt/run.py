"""The program: train as the config says, with checkpoints, and draw how it went."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from support.progress import Progress

import meshlib as dist
from gpt.config import Config
from gpt.pictures import draw_losses, draw_timelines
from gpt.trainer import Trainer
from meshlib.checkpoint import Checkpointer
from parallel.stage_states import StageStates

HERE = Path(__file__).parent


class Saving:
    """Checkpoints of a run, which load on any other mesh; ``folder`` None: there are none."""

    def __init__(self, trainer: Trainer, folder: str | None) -> None:
        settings = trainer.config.checkpoints
        self.every = settings.every
        self._states = StageStates(trainer.model, trainer.optimizer, trainer.dims.mesh)
        self._files = Checkpointer(folder, keep_last=settings.keep) if folder else None

    def resume(self) -> list[float]:
        """Go on from the newest checkpoint, if there is one; return the losses until then."""
        if self._files is None or self._files.latest() is None:
            return []
        state = self._files.load({**self._states.layout(), "losses": ...})
        self._states.restore(state)
        return state["losses"].tolist()

    def after_step(self, losses: list[float]) -> None:
        """Save if it is time to; the next step begins when the state was copied."""
        if self._files is not None and len(losses) % self.every == 0:
            state = {**self._states.state(), "losses": np.array(losses)}
            self._files.async_save(state, step=len(losses), metric=losses[-1])

    def close(self) -> None:
        """Wait for what is being saved."""
        if self._files is not None:
            self._files.close()


def train(
    trainer: Trainer, folder: str | None = None, stop_after: int | None = None
) -> list[float]:
    """Train, from the newest checkpoint in ``folder`` on; return the losses of all steps."""
    saving = Saving(trainer, folder)
    losses = saving.resume()
    steps = trainer.config.schedule.steps
    with Progress(dist.get_rank() == 0) as progress:
        advance = progress.task(trainer.dims.mesh.described(), steps, len(losses))
        for number in range(len(losses), steps if stop_after is None else stop_after):
            losses.append(trainer.step(number))
            advance(f"loss {losses[-1]:.3f}")
            saving.after_step(losses)
    saving.close()
    return losses


def main() -> None:
    """Read the config, train, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "gpt.toml")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the pictures go")
    parser.add_argument("--checkpoints", help="save here, and go on from what is here")
    parser.add_argument("--stop-after", type=int, help="cut the run after so many steps")
    args = parser.parse_args()
    config = Config(args.config)
    mesh = dist.init_device_mesh()  # the one that `meshrun --mesh` was given
    trainer = Trainer(config, mesh)
    losses = train(trainer, args.checkpoints or config.checkpoints.folder or None, args.stop_after)
    timing = trainer.schedule.timeline() if trainer.dims.sizes.pp > 1 else None
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    if not first:
        return
    draw_losses(losses, mesh.described(), args.out / "gpt.png")
    np.savetxt(args.out / "gpt-losses.txt", losses, "%.17g")
    print(f"loss curve {args.out / 'gpt.png'}")
    if timing is not None:
        draw_timelines(trainer.schedule.table, timing, args.out / "gpt-pipeline.png")
        print(f"timeline of the last step {args.out / 'gpt-pipeline.png'}")
    print(
        f"{len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f} nats on {mesh.described()}"
    )
