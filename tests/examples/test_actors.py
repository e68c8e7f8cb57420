"""The examples of remote calls that learn by trying: actors and a learner, a pool of evaluators."""

import subprocess
import sys
from pathlib import Path

import actor_learner
import evaluators
import numpy as np
import pytest
from cart_pole import MOST_STEPS, CartPole

from meshlib.testing import run_ranks

MESHRUN = Path(sys.executable).with_name("meshrun")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "rpc"


def test_a_pole_falls_to_the_side_that_the_cart_leaves():
    cart = CartPole(np.random.default_rng(0))
    steps = 1
    while cart.push(True):
        steps += 1
    position, speed, angle, _ = cart.state
    assert position > 0
    assert speed > 0
    assert angle < -0.2
    assert steps < 20


def test_a_pole_that_is_watched_stands_until_the_end():
    cart, steps = CartPole(np.random.default_rng(0)), 1
    while cart.push(bool(cart.state @ [0.1, 0.5, 2.0, 1.0] > 0)):
        steps += 1
    assert steps == MOST_STEPS


def test_actors_get_better_with_what_the_learner_learns():
    lengths = run_ranks(lambda: actor_learner.run(episodes=40), 3, timeout=50)[0]
    assert len(lengths) == 40
    assert np.mean(lengths[-10:]) > 1.5 * np.mean(lengths[:10])


def test_a_pool_has_each_candidate_tried_once():
    scores, done = run_ranks(lambda: evaluators.run(generations=3), 3, timeout=50)[0]
    assert len(scores) == 3
    assert scores[-1] > scores[0]
    assert sum(done.values()) == 3 * 24
    assert set(done) <= {1, 2}


@pytest.mark.processes
def test_the_candidates_of_an_evaluator_that_dies_go_to_others(tmp_path):
    command = [MESHRUN, "-n", "3", "--on-failure", "continue", EXAMPLES / "evaluators.py"]
    done = subprocess.run(
        [*map(str, command), "--generations", "2", "--lose", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "rank 2 was killed by SIGKILL" in done.stderr or "rank 2: killed" in done.stderr
    tried = done.stdout.splitlines()[-1].removeprefix("tried: ").split(", ")
    assert sum(int(one.split()[-1]) for one in tried) == 48
