"""Several models in one server: their files, loading and unloading."""
