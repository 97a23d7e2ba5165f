"""Requests in, tokens out; knows nothing of files, terminals or HTTP."""
