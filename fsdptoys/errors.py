"""Exceptions that determine the exit status of a command."""


class ConfigError(ValueError):
    """A configuration mistake. The message is one sentence that names the key, the value and a fix.

    The command line prints the message without a traceback and exits with status 2.
    """


class GivenUpError(RuntimeError):
    """The run stopped itself because neither continuing nor restarting would help; the message gives the reason."""


class LostWorkerError(RuntimeError):
    """A process that prefetches batches has ended; the message names it and possible causes."""


class LostRanksError(RuntimeError):
    """A collective timed out or failed; the message names the ranks that did not arrive."""
