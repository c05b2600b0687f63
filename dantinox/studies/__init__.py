"""Long comparisons that end in tables with confidence intervals: `dantinox eval` and `dantinox sweep`."""
