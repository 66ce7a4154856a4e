"""On-device benchmarks: speed of both ways of decoding, memory by component, limits, and what to do about them."""
