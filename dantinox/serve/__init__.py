"""The HTTP server: an asyncio front of the engine, one adapter per protocol, and a web page."""
