"""The objectives that learn from preferences, and the default of `training.preference_beta` for
each.
"""

# Objective → `training.preference_beta` if that is null.
USUAL_BETAS = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
PREFERENCE_OBJECTIVES = tuple(USUAL_BETAS)
