"""What a batch leaves on disk: records, results to read, answers about parts. Knows no engine."""
