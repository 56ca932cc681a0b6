"""Train a controller for a reward of your own: here every seed that is planted costs something.

python examples/own_reward.py  # a training that learns much takes minutes (esper docs training)
esper train iris --reward examples/own_reward.py:frugal  # the same from the shell
"""

import esper


def frugal(config):
    """Make a reward that pays for the rise of the metric, and charges for every seed that is planted."""

    def reward(outcome):
        after = outcome.after if outcome.exported is None else outcome.exported  # as shipped, in the last step
        planted = outcome.accepted & (outcome.actions.op == esper.Op.GERMINATE)
        return {"metric": after.metric - outcome.before.metric, "planting": -0.02 * planted}

    return reward


if __name__ == "__main__":
    settings = {
        "envs": 4,
        "steps": 8,
        "reward": {"group_size": 2},
        "ppo": {"rounds": 3, "imitation_rounds": 1, "validate_envs": 4},
    }
    summary = esper.train("iris", settings, reward=frugal, run="runs/frugal", overwrite=True)
    print(f"{summary['rounds_done']} rounds, best validation J {summary['best_validation_objective']:.3f}")
    figures = esper.open_run("runs/frugal").rounds["figures"]
    print("reward of an episode, by round:", [round(figure["return"], 2) for figure in figures])
