"""Adds seeds to any `nn.Module`: finds its sites, plants there, and folds what was kept into its layers."""
