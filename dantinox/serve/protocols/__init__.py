"""The client protocols. Each module parses bodies into requests and formats deltas and errors."""
