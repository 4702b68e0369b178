"""Output of commands: tables, streamed text, plots, provenance."""
