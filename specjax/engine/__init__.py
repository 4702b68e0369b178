"""The host shell around the pure core: loading, requests, batches, generation."""
