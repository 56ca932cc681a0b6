"""Measure how much of a policy's gradient on trained hosts is signal, by lambda and by what the baseline is.

    python bench/scripts/study_heal_ppo.py OUT --seeds 1 --rounds 20
    python bench/scripts/measure_gradient_signal.py OUT/ppo-s0/controller

The policy plays some rounds of training instances, and the gradient of its loss is computed from each 16 episodes apart. The
signal is the mean product of two of these gradients, which share no instance: the square of the expected gradient. The rest of
their mean square is noise. "Episodes" says from how many on the mean gradient has as much signal as noise. What an error of the
critic adds to the expected gradient is part of the signal.
"""

import argparse
from pathlib import Path

import torch
from study_heal_ppo import SETTINGS, few_hosts
from torch import Tensor

from esper.runs.configuration import training_configs
from esper.runs.train import Trainer, WorkItem, cohorts_of
from esper.tamiyo.policy.controller import load_policy

TOGETHER = 16
"""Episodes of one gradient: whole groups, which share an instance."""
AT = 1000
"""Round from which instances are drawn, after those of any training."""
ESTIMATORS = (
    *((lam, True, True) for lam in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)),
    *((lam, True, False) for lam in (0.8, 0.95)),
    (1.0, False, True),
)
"""Lambda, whether there is a critic, and whether the mean of the group is subtracted."""


def main() -> None:
    """Play, and print a row for each estimator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("controller", type=Path, metavar="CONTROLLER", help="folder of a trained controller")
    parser.add_argument("--rounds", type=int, default=8, metavar="R", help="rounds of 64 episodes that are played (8)")
    parser.add_argument("--progress", type=float, default=0.5, metavar="P", help="of the annealed exploration (.5)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = few_hosts()
    (config,) = training_configs([task], "quick", SETTINGS, {"ppo": {"rounds": 101}})
    trainer = Trainer(cohorts_of(task.sealed(), config), load_policy(arguments.controller), config)
    learner, client = trainer.learner, trainer.clients["training"][0]
    learner.round, learner.begun = round(100 * arguments.progress), 0
    played = []
    for number in range(arguments.rounds):
        part = WorkItem("training", 0, AT + number, AT + number)
        trainer.finish(part, trainer.begin(part))
        played.append((client.rollout(), client.menu))
        client.clear()
    parameters = [weight for name, weight in learner.policy.network.named_parameters() if "value" not in name]

    def gradients(lam: float, critic: bool, grouped: bool) -> Tensor:
        """Return the gradients (n, weights) of the loss of the policy."""
        weight = config.ppo.value_weight if critic else 0.0
        learner.config = config.ppo.model_copy(update={"gae_lambda": lam, "value_weight": weight})
        learner.group = config.reward.group_size if grouped else None
        rows = []
        for rollout, menu in played:
            whole = learner._batch(rollout, menu)
            judged, _ = learner._judge(whole)
            centre = 0.0 if grouped else whole.advantage[whole.weight > 0].mean()
            losses = -(judged.log_prob * (whole.advantage - centre) * whole.weight) / whole.weight.mean()
            for some in losses.split(TOGETHER, 1):
                found = torch.autograd.grad(some.mean(), parameters, retain_graph=True, allow_unused=True)
                pairs = zip(parameters, found, strict=True)
                rows.append(torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in pairs]))
        return torch.stack(rows)

    print("| lambda | critic | group | signal | episodes |\n|---|---|---|---|---|")
    for lam, critic, grouped in ESTIMATORS:
        found = gradients(lam, critic, grouped)
        every, squares = float((found @ found.T).sum()), float(found.square().sum())
        share = (every - squares) / (squares * (len(found) - 1))
        needed = f"{TOGETHER * (1 - share) / share:,.0f}" if share > 0 else "-"
        cells = (f"{lam:g}", "yes" if critic else "no", "yes" if grouped else "no")
        print(f"| {' | '.join(cells)} | {share:.2%} | {needed} |", flush=True)


if __name__ == "__main__":
    main()
