"""`tierforce serve`: an OpenAI-compatible server for the engine, with a chat page."""
