"""What a program computes: prefill and decoding, its features and steppers, the plan of the cache,
prepared weights.
"""
