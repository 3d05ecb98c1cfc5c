"""Numerics of methods: attention statistics without T x T tensors, rotations, moments, proxies, quantisation."""
