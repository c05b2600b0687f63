"""What the host checks between two tokens: constraints, banned texts, limits of reasoning, token
healing, stop strings.
"""
