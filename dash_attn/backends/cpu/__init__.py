"""The CPU backend: a forward tile by tile, and a backward that replays a Program on worker threads."""
