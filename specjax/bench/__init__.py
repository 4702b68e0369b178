"""Measuring, so that figures can be compared: everything interleaved in one process, and medians."""
