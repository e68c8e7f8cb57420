"""The loss that keeps experts equally busy."""

from __future__ import annotations

from parallel.arrays import Array


def load_balance(counts: Array, shares: Array) -> tuple[float, Array]:
    """Return the balance loss ``n * sum_e(f_e * P_e)``, and its gradient by ``shares``.

    f_e is the share of all choices that fell on expert e, P_e the mean over the tokens of what the
    router gave it. The loss is 1 where all experts are equally busy, and n where one has all. f_e
    has no derivative: the gradient goes through P_e.

    Lepikhin et al., "GShard", arXiv:2006.16668, section 2.2; Fedus et al., "Switch Transformers",
    arXiv:2101.03961, equation 4.

    Args:
        counts: how many choices fell on each of the n experts, (n,); over all ranks whose tokens
            count.
        shares: what the router gave each expert of each token here, (tokens, n); rows sum to 1.

    Returns:
        The loss, this rank's share of it: its average over ranks of equally many tokens is the
        loss of all of their tokens. And the gradient, which is the same for each token: (n,).
    """
    tokens, experts = shares.shape
    total = counts.sum()
    if not tokens or not total:
        return 0.0, shares.sum(axis=0)
    fractions = (counts / total).astype(shares.dtype)
    return (
        experts * float((fractions * shares.mean(axis=0)).sum()),
        fractions * (experts / tokens),
    )
