"""Distributed training from scratch, on torch and its collectives; each toy has a core of at most
500 lines."""
