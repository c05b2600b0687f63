"""The HTTP server: an asyncio front end of the engine, one adapter per protocol, and a web page."""
