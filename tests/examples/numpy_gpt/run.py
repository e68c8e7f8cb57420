"""Training as the config says, with checkpoints."""

from __future__ import annotations

import numpy as np
from support.progress import Progress

import meshlib as dist
from meshlib.checkpoint import Checkpointer
from numpy_gpt.trainer import Trainer
from parallel.stage_states import StageStates


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
