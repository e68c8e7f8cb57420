"""Train a character GPT with JAX on a dp × tp mesh, on the source of Python's own library.

    meshrun --mesh examples/gpt_jax_2d.toml examples/gpt_jax_2d.py

The whole step is one jitted function. Inside it gradients are averaged over the replicas (dp) while
XLA still computes, and attention heads and the hidden layers are split over the ranks of a replica
(tp). Any mesh will do whose tp divides the heads: ``--mesh dp=2``, ``--mesh tp=4``. ``--resume``
goes on from the last checkpoint, exactly: the same losses as without a break.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.any_mesh import replicas_and_tp
from support.progress import Progress
from support.settings import SettingsFile

import meshlib as dist
from meshlib import DeviceMesh
from meshlib import jit as mj
from parallel import DistributedBatchSampler, DistributedSampler
from parallel.jax import DistributedDataParallel, copy_to_region, reduce_from_region

HERE = Path(__file__).parent
Params = dict[str, Any]

# ---------------------------------------------------------------- settings


@dataclass(frozen=True)
class Data:
    """The config's table ``[data]``."""

    characters: int


@dataclass(frozen=True)
class Model:
    """The config's table ``[model]``."""

    layers: int
    width: int
    heads: int
    context: int


@dataclass(frozen=True)
class Training:
    """The config's table ``[train]``; ``batch_size`` is that over all replicas."""

    steps: int
    batch_size: int
    lr: float
    warmup: int
    weight_decay: float
    checkpoint_every: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """The config's table ``[sample]``."""

    prompt: str
    length: int
    temperature: float


class Config:
    """All settings. Raises ValueError with file and key for what is wrong or does not fit."""

    def __init__(self, path: Path, replicas: int, tp: int) -> None:
        file = SettingsFile(path)
        self.data = file.read("data", Data, ["characters"])
        self.model = file.read("model", Model, ["layers", "width", "heads", "context"])
        self.train = file.read("train", Training, ["steps", "batch_size", "checkpoint_every"])
        self.sample = file.read("sample", Sample, ["length", "temperature"])
        if self.train.batch_size % replicas:
            file.wrong("train", "batch_size", f"which does not divide by {replicas} replicas")
        if self.model.heads % tp:
            file.wrong("model", "heads", f"which does not divide by the {tp} ranks of tp")
        if self.model.width % self.model.heads:
            file.wrong("model", "width", f"which does not divide by {self.model.heads} heads")


# ---------------------------------------------------------------- data


class Text(NamedTuple):
    """A text as numbers (n,), uint8, and the characters that they stand for."""

    codes: np.ndarray
    alphabet: str

    def windows(self, starts: list[int], length: int) -> np.ndarray:
        """Return pieces of the text, (len(starts), length), int32."""
        return np.stack([self.codes[start : start + length] for start in starts]).astype(np.int32)


def read_library(characters: int) -> Text:
    """Return the first ``characters`` of the standard library's modules, in alphabetical order."""
    pieces, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        piece = path.read_text("ascii", errors="ignore")
        pieces.append(piece)
        total += len(piece)
        if total >= characters:
            break
    text = "".join(pieces)[:characters]
    alphabet = "".join(sorted(set(text)))
    table = np.zeros(128, np.uint8)
    table[[ord(character) for character in alphabet]] = np.arange(len(alphabet))
    return Text(table[np.frombuffer(text.encode("ascii"), np.uint8)], alphabet)


# ---------------------------------------------------------------- model


def init(settings: Model, vocabulary: int, seed: int) -> Params:
    """Return the whole model's parameters, the same on every rank."""
    rng = np.random.default_rng(seed)
    width, heads = settings.width, settings.heads

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.normal(size=shape) * scale * shape[0] ** -0.5).astype(np.float32)

    return {
        "tokens": (rng.normal(size=(vocabulary, width)) * 0.1).astype(np.float32),
        "places": (rng.normal(size=(settings.context, width)) * 0.1).astype(np.float32),
        "blocks": [
            {
                "norm_1": np.ones(width, np.float32),
                "qkv": draw(width, 3, heads, width // heads),
                "attended": draw(heads, width // heads, width, scale=0.3),
                "norm_2": np.ones(width, np.float32),
                "up": draw(width, 4 * width),
                "down": draw(4 * width, width, scale=0.3),
            }
            for _ in range(settings.layers)
        ],
        "norm": np.ones(width, np.float32),
        "head": draw(width, vocabulary),
    }


SPLIT_AXES = {"qkv": 2, "attended": 0, "up": 1, "down": 0}
"""Which axis of a parameter is split over tp: heads, and the hidden layer's features."""


def shard(params: Params, tp: DeviceMesh) -> Params:
    """Return this rank's part of the whole model."""
    rank, size = dist.get_rank(tp), dist.get_world_size(tp)

    def part(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        axis = SPLIT_AXES.get(getattr(path[-1], "key", ""))
        return leaf if axis is None else np.split(leaf, size, axis)[rank]

    return jax.tree_util.tree_map_with_path(part, params)


def normalise(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``x`` with a root mean square of 1 along the last dim, scaled."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attend(block: Params, x: jax.Array) -> jax.Array:
    """Return causal self-attention over this rank's heads: (batch, time, width), a partial sum."""
    q, k, v = jnp.einsum("btw,wchd->cbhtd", x, block["qkv"])
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhts,bhsd,hdw->btw", weights, v, block["attended"])


def apply(params: Params, tokens: jax.Array, tp: DeviceMesh) -> jax.Array:
    """Return the logits (batch, time, vocabulary) for tokens (batch, time)."""
    x = params["tokens"][tokens] + params["places"][: tokens.shape[1]]
    for block in params["blocks"]:
        inside = copy_to_region(normalise(x, block["norm_1"]), tp)
        x = x + reduce_from_region(attend(block, inside), tp)
        inside = copy_to_region(normalise(x, block["norm_2"]), tp)
        x = x + reduce_from_region(jax.nn.gelu(inside @ block["up"]) @ block["down"], tp)
    return normalise(x, params["norm"]) @ params["head"]


def loss_fn(params: Params, windows: jax.Array, tp: DeviceMesh) -> jax.Array:
    """Return the mean cross-entropy of each character given those before it, in nats."""
    logits = apply(params, windows[:, :-1], tp)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@partial(jax.jit, static_argnames=("length", "context", "tp"))
def generate(
    params: Params,
    prompt: jax.Array,
    key: jax.Array,
    temperature: float,
    *,
    length: int,
    context: int,
    tp: DeviceMesh,
) -> jax.Array:
    """Return ``length`` tokens that go on from ``prompt`` (n,). All ranks of ``tp`` call it."""

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
        window, filled = carry
        logits = apply(params, window[None], tp)[0, filled - 1]
        token = jax.random.categorical(key, logits / temperature)
        full = filled == context
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, context - 1, filled)].set(token)
        return (window, jnp.minimum(filled + 1, context)), token

    window = jnp.zeros(context, jnp.int32).at[: len(prompt)].set(prompt)
    start = (window, jnp.int32(len(prompt)))
    return jax.lax.scan(step, start, jax.random.split(key, length))[1]


# ---------------------------------------------------------------- checkpoints


class Checkpoints:
    """Files in ``folder``: one for each rank of tp, written by the first replica.

    A new file takes an old one's place in one step; the other ranks wait until all are there.
    """

    def __init__(self, folder: Path, dp: DeviceMesh, tp: DeviceMesh) -> None:
        self._dp = dp
        self._path = folder / f"gpt_jax_2d-tp{dist.get_rank(tp)}.npz"

    def save(self, state: Any, progress: dict[str, Any]) -> None:
        """Write the pytree ``state`` and ``progress`` (JSON)."""
        if dist.get_rank(self._dp) == 0:
            leaves = {f"leaf_{i}": x for i, x in enumerate(jax.tree_util.tree_leaves(state))}
            unfinished = self._path.with_suffix(".unfinished")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                np.savez(file, progress=json.dumps(progress), **leaves)
            os.replace(unfinished, self._path)
        dist.barrier()

    def load(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """Return what was saved, the state with the structure of ``like``."""
        structure = jax.tree_util.tree_structure(like)
        with np.load(self._path) as file:
            leaves = [jnp.asarray(file[f"leaf_{i}"]) for i in range(structure.num_leaves)]
            progress = json.loads(str(file["progress"]))
        return jax.tree_util.tree_unflatten(structure, leaves), progress


# ---------------------------------------------------------------- training


def train(
    config: Config,
    dp: DeviceMesh,
    tp: DeviceMesh,
    text: Text,
    checkpoints: Checkpoints,
    resume: bool,
    break_at: int | None,
) -> tuple[Params, list[float]]:
    """Train, or go on; return this rank's parameters, and the loss of each step."""
    settings, context = config.train, config.model.context
    local_batch = settings.batch_size // dp.size()
    whole = init(config.model, len(text.alphabet), settings.seed)
    ddp = DistributedDataParallel(shard(whole, tp), dp)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.lr, settings.warmup, settings.steps)
    optimizer = optax.adamw(schedule, weight_decay=settings.weight_decay)

    @jax.jit
    def step(params: Params, state: Any, windows: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = ddp.value_and_grad(loss_fn)(params, windows, tp)
        updates, state = optimizer.update(grads, state, params)
        loss = mj.all_reduce(loss, dist.ReduceOp.AVG, dp)
        return optax.apply_updates(params, updates), state, loss

    params, state = ddp.params, optimizer.init(ddp.params)
    sampler = DistributedSampler(len(text.codes) // context - 1, mesh=dp, seed=settings.seed)
    batches = DistributedBatchSampler(sampler, local_batch, drop_last=True)
    losses: list[float] = []
    if resume:
        (params, state), done = checkpoints.load((params, state))
        batches.load_state_dict(done["sampler"])
        losses = done["losses"]

    with Progress(dist.get_rank() == 0) as progress:
        advance = progress.task("training", settings.steps, len(losses))
        while len(losses) < settings.steps:
            for batch in batches:
                starts = [context * number for number in batch.indices]
                params, state, loss = step(params, state, text.windows(starts, context + 1))
                losses.append(float(loss))
                advance(f"loss {losses[-1]:.3f}")
                if len(losses) % settings.checkpoint_every == 0:
                    so_far = {"sampler": batches.state_dict(), "losses": losses}
                    checkpoints.save((params, state), so_far)
                if len(losses) == settings.steps:
                    break
                if len(losses) == break_at:
                    raise SystemExit(f"broken off at step {break_at}")
    return params, losses


def plot(losses: list[float], path: Path) -> None:
    """Draw the losses into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="nats per character", title="a GPT on Python's library")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    """Train on the mesh, then write some text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=HERE / "gpt_jax_2d.toml")
    parser.add_argument("--out", type=Path, default=Path("out"), help="checkpoints and picture")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--break-at", type=int, metavar="STEP", help="end there, as if the job had been killed"
    )
    args = parser.parse_args()

    mesh = dist.init_device_mesh()  # the one that `meshrun --mesh` was given
    dp, tp = replicas_and_tp(mesh)
    config = Config(args.config, dp.size(), tp.size())
    text = read_library(config.data.characters)
    checkpoints = Checkpoints(args.out, dp, tp)
    params, losses = train(config, dp, tp, text, checkpoints, args.resume, args.break_at)

    if dist.get_rank(dp) == 0:
        sample = config.sample
        prompt = np.array([text.alphabet.index(character) for character in sample.prompt])
        tokens = np.asarray(
            generate(
                params,
                prompt,
                jax.random.key(config.train.seed),
                sample.temperature,
                length=sample.length,
                context=config.model.context,
                tp=tp,
            )
        )
        written = sample.prompt + "".join(text.alphabet[token] for token in tokens)
        if dist.get_rank() == 0:
            picture = args.out / "gpt_jax_2d.png"
            plot(losses, picture)
            print(f"\n{written}\n")
            print(f"loss curve {picture}")
            print(
                f"{len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per character"
                f" (guessing among {len(text.alphabet)}: {np.log(len(text.alphabet)):.4f})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
