"""DantinoX: train transformers from one YAML file and generate text with them."""
