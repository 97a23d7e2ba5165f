"""Host memory, the host link, and transfers over it; independent of attention."""
