"""What operators of a server need: keys, limits, logs, metrics, traces and reloads."""
