"""Shared helpers: files and locks, foreign input, text, bounds and DTensors."""
