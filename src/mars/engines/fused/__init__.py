"""The fused engine: Triton kernels over tables of addresses, a few launches for all tensors."""
