"""The decoder, its spec and the loading of its weights."""
