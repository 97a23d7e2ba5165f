"""The formats of OpenAI's API: bodies of requests, and responses. They know no connections."""
