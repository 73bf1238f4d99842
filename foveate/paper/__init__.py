"""Reproduction of Jansson and Lindeberg (ICPR 2020): the tables, the claims and the quickstart."""
