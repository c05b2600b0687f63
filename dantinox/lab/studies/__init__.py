"""Comparisons that produce tables with confidence intervals: `dantinox eval` and
`dantinox sweep`.
"""
