"""Learn handwritten digits on a dp × tp mesh, then check the result against one process.

    meshrun --mesh examples/digits_2d.toml examples/digits_2d.py

The data are scikit-learn's ``load_digits``: 1,797 scans of 8 × 8 pixels. The replicas (dp) share
batches, and the ranks of one replica (tp) share the hidden layer. Everything is float64, so only
the order of additions differs from one process. ``--mesh dp=3`` or ``--mesh tp=4``, for example,
replaces the mesh in the file. With ``--checkpoints DIR`` the program saves checkpoints, and resumes
from the newest one, which may be from another mesh.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support import digits
from support.any_mesh import replicas_and_tp
from support.progress import Progress
from support.settings import SettingsFile

import meshlib as dist
from meshlib import DeviceMesh
from meshlib.checkpoint import Checkpointer
from parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    DistributedSampler,
    RowwiseParallel,
    nn,
    optim,
    parallelize,
)
from parallel.state import global_layout, global_state, restore

HERE = Path(__file__).parent
CLASSES = 10


@dataclass(frozen=True)
class Model:
    """The config's table ``[model]``."""

    hidden: int


@dataclass(frozen=True)
class Training:
    """The config's table ``[train]``; ``batch_size`` counts the samples of all replicas."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    seed: int


class Digits(NamedTuple):
    """Images (n, 64), float64 in [0, 1], and their labels (n,)."""

    images: np.ndarray
    labels: np.ndarray


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """Return a training and a test set, 4 to 1, split the same way on every rank."""
    images, labels = digits.load_digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    train, test = np.split(order, [len(order) * 4 // 5])
    return Digits(images[train] / 16, labels[train]), Digits(images[test] / 16, labels[test])


def make_model(hidden: int, seed: int, tp: DeviceMesh | None) -> nn.Sequential:
    """Return the whole classifier, or with ``tp`` this rank's part of it."""
    rng = np.random.default_rng(seed)
    wide = nn.Linear(64, hidden, rng=rng, dtype="float64")
    narrow = nn.Linear(hidden, 64, rng=rng, dtype="float64")
    head = nn.Linear(64, CLASSES, rng=rng, dtype="float64")
    model = nn.Sequential(wide, nn.GELU(), narrow, nn.LayerNorm(64, dtype="float64"), head)
    if tp is not None:
        parallelize(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


@dataclass
class Saving:
    """Checkpoints of a run, one after ``every`` steps; ``stop_after`` ends the run early."""

    checkpoints: Checkpointer
    every: int
    stop_after: int | None

    def resume(
        self, model: nn.Module, optimizer: optim.Optimizer, sampler: DistributedSampler
    ) -> list[float]:
        """Resume from the newest checkpoint, if any; return the losses of the steps before it."""
        if self.checkpoints.latest() is None:
            return []
        like = {**global_layout(model, optimizer), "sampler": ..., "losses": ...}
        state = self.checkpoints.load(like)
        restore(state, model, optimizer)
        sampler.load_state_dict(state["sampler"])
        return state["losses"].tolist()

    def after_step(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        cursor: dict[str, object],
        losses: list[float],
    ) -> None:
        """Save after every ``every`` steps; return once the state is copied.

        If the job has to end, all ranks save after the same step, and exit with the code that asks
        for a restart.
        """
        stops = dist.should_stop(len(losses))
        if len(losses) % self.every == 0 or stops:
            until = {"sampler": cursor, "losses": np.array(losses)}
            state = {**global_state(model, optimizer), **until}
            self.checkpoints.async_save(state, step=len(losses), metric=losses[-1])
        if stops:
            self.checkpoints.close()
            raise SystemExit(os.EX_TEMPFAIL)
        if len(losses) == self.stop_after:
            self.checkpoints.close()
            raise SystemExit(f"stopped after {len(losses)} steps")


def train(
    model: nn.Module,
    data: Digits,
    sampler: DistributedSampler,
    settings: Training,
    progress: Progress,
    title: str,
    dp: DeviceMesh | None = None,
    saving: Saving | None = None,
) -> list[float]:
    """Train ``model`` on this replica's share of ``data``; return the loss of each whole batch."""
    optimizer = optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    loss_function = nn.CrossEntropyLoss()
    local_batch = settings.batch_size // sampler.num_replicas
    steps = len(sampler) // local_batch
    module = model.module if isinstance(model, DistributedDataParallel) else model
    losses = saving.resume(module, optimizer, sampler) if saving else []
    advance = progress.task(title, steps * settings.epochs, len(losses))
    for epoch in range(sampler.epoch, settings.epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(full_batches(sampler, local_batch), 1):
            optimizer.zero_grad()
            loss = loss_function(model(data.images[batch]), data.labels[batch])
            model.backward(loss_function.backward())
            optimizer.step()
            if dp is not None:  # all shares of a batch are equally large
                loss = float(dp.all_reduce(np.array(loss), op=dist.ReduceOp.AVG))
            losses.append(loss)
            advance(f"loss {loss:.3f}")
            if saving:
                cursor = sampler.state_dict(num_consumed=number * local_batch)
                saving.after_step(module, optimizer, cursor, losses)
    return losses


def full_batches(sampler: DistributedSampler, size: int) -> Iterator[np.ndarray]:
    """Yield the sampler's indices in arrays of ``size``; drop the remainder."""
    indices = np.fromiter(sampler, np.int64)
    for begin in range(0, len(indices) - size + 1, size):
        yield indices[begin : begin + size]


def count_correct(model: nn.Module, data: Digits, indices: list[int]) -> int:
    """Return the number of images that the model classifies correctly."""
    model.eval()
    return int((model(data.images[indices]).argmax(axis=-1) == data.labels[indices]).sum())


def gather_whole(model: nn.Sequential, hidden: int, seed: int) -> nn.Sequential:
    """Return the model with whole layers. Every rank calls it."""
    whole = make_model(hidden, seed, tp=None)
    whole.load_state_dict(model.state_dict())
    return whole


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest absolute difference between two models' parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float(np.abs(a.data - b.data).max()) for a, b in pairs)


def plot(losses: list[float], reference: list[float], path: Path) -> None:
    """Draw both runs' losses into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, label="mesh", linewidth=3, alpha=0.5)
    axes.plot(reference, label="one process", linewidth=1)
    axes.set(xlabel="step", ylabel="cross-entropy", yscale="log", title="load_digits")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    """Train on the mesh, evaluate, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "digits_2d.toml")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    parser.add_argument("--checkpoints", type=Path, help="save here, and resume from here")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps")
    args = parser.parse_args()
    file = SettingsFile(args.config)
    hidden = file.read("model", Model, ["hidden"]).hidden
    settings = file.read("train", Training, ["epochs", "batch_size"])
    seed = settings.seed

    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    dp, tp = replicas_and_tp(mesh)
    if settings.batch_size % dp.size():
        file.wrong("train", "batch_size", f"which is not divisible by {dp.size()} replicas")
    if hidden % tp.size():
        file.wrong("model", "hidden", f"which is not divisible by the {tp.size()} ranks of tp")
    first = dist.get_rank() == 0
    training, test = load_digits(seed)

    with Progress(first) as progress:
        model = make_model(hidden, seed, tp)
        ddp = DistributedDataParallel(model, dp)
        sampler = DistributedSampler(training.labels, mesh=dp, seed=seed)
        saving = None
        if args.checkpoints is not None:
            checkpoints = Checkpointer(args.checkpoints, keep_last=2, keep_best=1)
            saving = Saving(checkpoints, args.save_every, args.stop_after)
        title = mesh.described()
        losses = train(ddp, training, sampler, settings, progress, title, dp, saving)
        if saving is not None:
            saving.checkpoints.close()

        share = DistributedSampler(test.labels, mesh=dp, evaluation=True)
        correct = dp.all_reduce(np.array(count_correct(model, test, list(share))))
        whole = gather_whole(model, hidden, seed)
        dist.destroy_process_group()
        if not first:
            return

        single = make_model(hidden, seed, tp=None)
        everything = DistributedSampler(training.labels, num_replicas=1, rank=0, seed=seed)
        reference = train(single, training, everything, settings, progress, "one process")

    picture = args.out / "digits_2d.png"
    plot(losses, reference, picture)
    np.savetxt(args.out / "losses.txt", losses, "%.17g")
    difference = largest_difference(whole, single)
    verdict = "agree within 1e-5" if difference <= 1e-5 else "DIFFER BY MORE THAN 1e-5"
    print(f"test accuracy {correct / len(test.labels):.1%} ({correct} of {len(test.labels)})")
    print(f"loss curve    {picture}")
    print(
        f"mesh {mesh.described()} and one process {verdict} in every parameter after "
        f"{len(losses)} steps (largest difference {difference:.1e})"
    )
    if difference > 1e-5:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
