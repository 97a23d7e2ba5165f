"""Tools in prompts, and calls of tools in answers. It knows no grammars and no server's format."""
