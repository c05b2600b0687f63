"""Measures a model, its weights and the machine it runs on."""
