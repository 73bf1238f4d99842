"""Methods by other authors that generalise over scale, each implemented after its paper."""
