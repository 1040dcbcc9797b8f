"""The CPU backend: torch's forward, and a backward that replays a Program on worker threads."""
