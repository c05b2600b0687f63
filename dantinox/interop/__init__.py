"""Foreign checkpoint formats (Hugging Face, GGUF, PEFT): one table per model family, used for import and export."""
