"""What users call: `LoadedModel`, chats, generation from token ids, and the offline runs behind
them.
"""
