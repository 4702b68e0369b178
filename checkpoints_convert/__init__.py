"""Checkpoint formats: Hugging Face safetensors folders and GGUF files on one side, our Orbax folder
on the other."""
