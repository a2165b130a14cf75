"""A sweep: one configuration after another, each in fresh processes, and a folder that tells how each ended."""

from .folder import Job, JobStatus, Skipped, Sweep, is_sweep_dir, read_sweep

__all__ = ["Job", "JobStatus", "Skipped", "Sweep", "is_sweep_dir", "read_sweep"]
