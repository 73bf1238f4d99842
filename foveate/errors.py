"""Exceptions for user errors; each message is one line with the value and the remedy."""


class FoveateError(Exception):
    """Base class of all errors that a user can fix; the command line prints them in one line."""


class ConfigError(FoveateError):
    """An invalid option or argument."""


class DataError(FoveateError):
    """A dataset or file that is missing, damaged or of the wrong kind."""
