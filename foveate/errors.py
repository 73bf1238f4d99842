"""What goes wrong for a user: one line that names the value and the remedy."""


class FoveateError(Exception):
    """Base of every error a user can cause and mend; the command line prints it in one line."""


class ConfigError(FoveateError):
    """An option or argument that cannot work."""


class DataError(FoveateError):
    """A data set or file that is missing, damaged or not what it should be."""
