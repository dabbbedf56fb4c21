"""Reads and writes networks: recognises a file, loads it without executing code that is not trusted, and saves it
atomically."""
