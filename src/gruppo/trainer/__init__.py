"""The story: a run is collect, learn, publish, step after step."""
