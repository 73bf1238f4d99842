"""Figures, tables and self-contained HTML pages of results."""
