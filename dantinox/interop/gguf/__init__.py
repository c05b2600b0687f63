"""GGUF files, in both directions."""
