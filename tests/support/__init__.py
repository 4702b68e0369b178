"""What tests share: models, the ways to drive the loop and the command, reference distributions."""
