"""Decide yourself where networks grow: a controller gets what is known of every network and returns a decision for each.

python examples/own_controller.py
esper grow spirals-narrow --controller examples/own_controller.py:Bypasses  # the same from the shell
"""

import numpy as np

import esper


class Bypasses(esper.Controller):
    """Plants a bypass around every block where one fits, and keeps a seed that helps clearly."""

    def act(self, view):
        """Decide for one step, from the `esper.View` of all networks."""
        actions = esper.Actions.wait(len(view.host_params))
        bypass = [blueprint.name for blueprint in view.space.blueprints].index("bypass-mlp")
        contribution = view.measurements.contribution
        helps = contribution.measured & (contribution.mean > 2 * contribution.se)  # (networks, slots)
        for env, valid in enumerate(view.masks.op):
            keep = view.masks.slot[env, esper.Op.FOSSILIZE] & helps[env]
            plant = view.masks.slot[env, esper.Op.GERMINATE] & view.masks.blueprint[env, :, bypass]
            if keep.any():
                actions.op[env], actions.slot[env] = esper.Op.FOSSILIZE, np.argmax(keep)
            elif valid[esper.Op.ADVANCE]:
                actions.op[env] = esper.Op.ADVANCE
                actions.slot[env] = np.argmax(view.masks.slot[env, esper.Op.ADVANCE])
            elif plant.any():
                slot = np.argmax(plant)
                actions.op[env], actions.slot[env], actions.blueprint[env] = esper.Op.GERMINATE, slot, bypass
                actions.tempo[env] = np.argmax(view.masks.tempo[env, esper.Op.GERMINATE, slot])
                actions.target[env] = np.argmax(view.masks.target[env, esper.Op.GERMINATE, slot])
        return actions


if __name__ == "__main__":
    summary = esper.grow("spirals-narrow", {"envs": 2, "steps": 16, "baselines": ["twin"]}, controller=Bypasses())
    esper.show(summary)
