"""The engine process: one loop that owns the device and runs one slice at a time."""
