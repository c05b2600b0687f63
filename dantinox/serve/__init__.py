"""Many people and one model: an engine of slots, the dialects that clients speak to it, and a page."""
