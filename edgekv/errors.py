"""What edgekv raises. The command line prints the sentence and exits with 2; a traceback, from anything else, is a defect."""


class EdgekvError(Exception):
    """Base of every error that edgekv raises on purpose; its text is one sentence for a person."""


class UserError(EdgekvError):
    """The input, an option or a file is at fault; the text says what to do about it."""


class BundleError(UserError):
    """A bundle cannot be read, is damaged, or was written by another version."""


class NativeError(EdgekvError):
    """The native library refused a call; the text is its own sentence."""


class CacheFullError(EdgekvError):
    """A cache that keeps everything has no slot left; generation ends with the finish reason `capacity`."""
