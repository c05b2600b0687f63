"""Checkpoints of other programs in and out: one table of names and shapes per family of models, read in both directions."""
