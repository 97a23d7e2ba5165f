"""Requests and answers as OpenAI's interface has them, guarded; knows nothing of models."""
