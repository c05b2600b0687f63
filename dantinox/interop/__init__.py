"""Import and export of Hugging Face, GGUF and PEFT checkpoints, with one table per model family for
both directions.
"""
