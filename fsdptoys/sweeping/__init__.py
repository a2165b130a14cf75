"""``fsdptoys sweep``: what was typed, multiplied out and validated, and handed to this machine or to a batch queue."""
