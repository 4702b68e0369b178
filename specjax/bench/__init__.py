"""Benchmarks: one file per command, with its measuring and its table.

Everything that is compared runs interleaved in one process, and medians are reported.
"""
