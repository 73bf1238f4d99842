"""What a network does: its errors over scale, measured and held against the theory."""
