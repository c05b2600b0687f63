"""Hugging Face checkpoints, in both directions."""
