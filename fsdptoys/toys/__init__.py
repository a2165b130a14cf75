"""Parallel strategies from scratch, to read: they know torch and its collectives, and nothing else of the project."""
