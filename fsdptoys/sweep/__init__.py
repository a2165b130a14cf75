"""A sweep: one configuration after another, each in new processes, with the outcome of each in a
folder."""

from .folder import Job, JobStatus, Skipped, Sweep, is_sweep_dir, read_sweep

__all__ = ["Job", "JobStatus", "Skipped", "Sweep", "is_sweep_dir", "read_sweep"]
