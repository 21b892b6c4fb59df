"""Matrix products with packed 4-bit weights, on CUDA and on the CPU."""
