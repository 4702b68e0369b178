"""Checkpoint formats: Hugging Face folders and GGUF files, and our own Orbax folder."""
