"""What the host checks between two tokens: constraints, banned texts, token healing, stop strings."""
