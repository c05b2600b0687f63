"""Tests of the model against a NumPy float64 transformer that shares no code with it."""
