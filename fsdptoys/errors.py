"""Exceptions that determine the exit status of a command."""


class ConfigError(ValueError):
    """A configuration mistake. The message is one sentence that names the key, the value and a fix.

    The command line prints the message without a traceback and exits with status 2.
    """


class UnusedKeyError(ConfigError):
    """A key does nothing with the other settings; the message begins with it. Sweeps drop it from
    such jobs."""

    @property
    def key(self) -> str:
        """The key, without a typed ``+``."""
        return str(self).partition("=")[0].lstrip("+")


class GivenUpError(RuntimeError):
    """The run stopped itself because neither continuing nor restarting would help; the message
    gives the reason."""


class LostWorkerError(RuntimeError):
    """A process that prefetches batches has ended; the message names it and possible causes."""


class LostRanksError(RuntimeError):
    """A collective timed out or failed; the message names the ranks that did not arrive."""
