"""Requests and responses in OpenAI's format, and their access control; independent of models."""
