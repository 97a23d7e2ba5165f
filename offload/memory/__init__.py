"""Host memory, the link to the device, and what moves over it; knows nothing of attention."""
