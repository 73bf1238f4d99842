"""Networks: the base network, scale channels around it, and the paper's five by name."""
