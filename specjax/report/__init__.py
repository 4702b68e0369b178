"""What commands show and write: tables, streamed text, plots, provenance."""
