"""One text at a time, for a person: generate, chat, ask, and the prompt cache."""
