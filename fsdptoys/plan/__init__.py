"""What a run would take, without the hardware: see ``fsdptoys plan``."""
