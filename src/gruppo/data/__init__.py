"""Where prompts come from: streams with a cursor and a held-out share."""
