"""Tools in prompts; calls and channels in answers. It knows no grammars and no server's format."""
