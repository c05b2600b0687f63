"""Tests of the model, against a NumPy transformer in float64 that shares no code with it."""
