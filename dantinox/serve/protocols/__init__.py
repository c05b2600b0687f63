"""The protocols that clients speak: each module parses bodies into requests and formats deltas and errors."""
