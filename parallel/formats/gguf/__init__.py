"""Reading GGUF files: header, tensors, names and metadata."""
