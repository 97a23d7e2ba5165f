"""`tierforce serve`: the engine behind an OpenAI-compatible interface, and a page for people."""
