"""What is trained: distributions over actions that can be sampled and evaluated."""
