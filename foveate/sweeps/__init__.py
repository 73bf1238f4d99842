"""Sweeps: studies of many training runs, and the engines that perform them."""
