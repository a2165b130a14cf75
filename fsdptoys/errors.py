"""The errors that have a name of their own: what a user can mend, and how a run may end that nobody can."""


class ConfigError(ValueError):
    """A mistake in the configuration, told in one sentence that names key, value and fix.

    The command line prints the sentence alone, without a traceback, and exits with status 2.
    """


class GivenUpError(RuntimeError):
    """The run ended itself, since going on, or starting again, makes no sense; the message says why."""


class LostWorkerError(RuntimeError):
    """A process that made batches ahead has ended; the message says which, and what may have ended it."""


class LostRanksError(RuntimeError):
    """A collective timed out or broke; the message says which ranks did not arrive."""
