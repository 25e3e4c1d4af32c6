"""What `edgekv verify` does: kernels against the reference, engines against each other, over a bundle."""
