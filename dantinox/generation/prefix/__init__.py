"""The prefix cache: keys and values of earlier requests, which later requests with the same start
reuse.
"""
