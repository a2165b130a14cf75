"""Parallel training from scratch, to read from top to bottom: torch, its collectives, and nothing of the project."""
