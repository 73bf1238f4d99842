"""Interactive web demo: rescale a digit or a photograph and compare networks side by side."""
