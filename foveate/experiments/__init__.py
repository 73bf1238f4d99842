"""Experiments: what is made of many finished runs."""
