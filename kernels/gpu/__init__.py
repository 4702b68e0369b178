"""Tools for the GPU kernels: ahead-of-time compilation, resources, checks, benchmark."""
