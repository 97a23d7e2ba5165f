"""What a batch leaves on disk: records, and answers about parts. It knows no engine."""
