"""The web page: draw a digit, change its size, and watch networks answer side by side."""
