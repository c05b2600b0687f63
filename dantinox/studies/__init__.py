"""Comparisons that take long and end in tables with intervals: `dantinox eval sampling` and `dantinox eval kv`."""
