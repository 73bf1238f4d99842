"""Networks: the base network, scale channels around any backbone, the paper's networks."""
