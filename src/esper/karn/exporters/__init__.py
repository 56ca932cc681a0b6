"""Exporters: the curves, the network and the final table of a run, written for other programs that show runs."""
