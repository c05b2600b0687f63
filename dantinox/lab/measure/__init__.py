"""Tools that inspect a model, its weights or the machine."""
