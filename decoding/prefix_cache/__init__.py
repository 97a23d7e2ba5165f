"""The prompt cache: the KV of prefilled prompts on disk; independent of decoding."""
