"""The one class of error for what a user can mend in a configuration, a file or a command line."""


class ConfigError(ValueError):
    """A mistake in the configuration, told in one sentence that names key, value and fix.

    The command line prints the sentence alone, without a traceback, and exits with status 2.
    """
