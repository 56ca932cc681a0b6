"""Find what goes wrong with a learner, from the figures of its rounds."""

import math
from collections.abc import Mapping, Sequence

from esper.leyline.config.tree import PPOConfig

ROUNDS = 10
"""Rounds in a row in which some conditions must hold."""
CLIPPED, VALUE_LOSS = 0.5, 10.0
"""Share of clipped decisions, and loss of the critic in units of the variance of returns, that are out of range."""
MENDS: Mapping[str, str] = {
    "entropy_collapsed": "raise ppo.entropy_weight or ppo.exploration, or imitate a rule first (ppo.imitation_rounds)",
    "value_loss_exploded": "the rewards changed or have outliers; check the reward, or lower ppo.lr",
    "ratios_out_of_range": "lower ppo.lr or ppo.update_epochs",
    "kl_stopped": "lower ppo.lr, or raise ppo.minibatches",
    "critic_blind": "raise ppo.value_weight, or set it to 0 where groups give the baseline",
    "nothing_kept": "raise steps, so that a seed can pass its gates, or loosen them (`esper docs lifecycle`)",
    "return_unchanged": "nothing that the policy does is rewarded; check the reward and the gates, or raise ppo.exploration",
}
"""What can be wrong, by name, and what mends it."""


def learning_anomalies(
    rounds: Sequence[Mapping[str, float]], first_entropy: float, config: PPOConfig
) -> dict[str, str]:
    """Return what is wrong after the last of some rounds of learning: a sentence by its name in `MENDS`.

    rounds: figures of the last rounds (`esper docs training`), the newest at the end. first_entropy: of the first round [nats].
    """
    newest, found = rounds[-1], {}
    entropy, loss, clipped = newest["entropy"], newest["value_loss"], newest["clip_fraction"]
    if newest["rewarded"] == 0 and entropy < 0.5 * first_entropy:
        found["entropy_collapsed"] = (
            f"the entropy fell from {first_entropy:.2f} to {entropy:.2f} nats before any round had returns that differ by "
            f"ppo.advantage_floor, {config.advantage_floor:g}: the policy has stopped exploring without a reward"
        )
    if config.value_weight and loss > VALUE_LOSS:
        found["value_loss_exploded"] = (
            f"the loss of the critic is {loss:.3g} times the variance of returns, above {VALUE_LOSS:g}: returns are far from "
            "all that it expected"
        )
    if clipped > CLIPPED:
        found["ratios_out_of_range"] = (
            f"the probability of {clipped:.0%} of the decisions was changed beyond ppo.clip_range, {config.clip_range:g}"
        )
    last = rounds[-ROUNDS:]
    returns = [each["return"] for each in last]
    # A training may be shorter than that; of a single round nothing can be said.
    enough = len(last) >= max(min(ROUNDS, config.rounds), 2)
    if enough and all(map(math.isfinite, returns)) and max(returns) - min(returns) <= 1e-6:
        episodes = int(sum(each["episodes"] for each in last))
        found["return_unchanged"] = (
            f"the mean return was {returns[-1]:.4g} in each of {len(last)} rounds, {episodes:,} episodes"
        )
    if len(last) < ROUNDS:
        return found
    if config.update_epochs > 1 and all(each["epochs"] == 1 for each in last):
        found["kl_stopped"] = (
            f"each of the last {ROUNDS} updates ended after its first pass, which moved the policy by more than "
            f"ppo.target_kl, {config.target_kl:g}"
        )
    if config.value_weight and all(each["explained_variance"] <= 0 for each in last):
        found["critic_blind"] = f"the critic has explained none of the variance of returns in {ROUNDS} rounds"
    if all(each["kept"] == 0 for each in last):
        found["nothing_kept"] = f"no seed was kept in {ROUNDS} rounds, so that no network grew"
    return found
