"""Vision networks that recognise things at sizes they were never trained on."""

__version__ = "0.1.0"
