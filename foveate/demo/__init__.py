"""The web page: change the size of a digit or a photograph, and watch networks side by side."""
