"""Simic: the school. The objective, and the run that grows a population under a controller."""
