"""Predicts the memory and time of a run without its hardware: ``fsdptoys plan``."""
