"""Terminal output: streams, messages and progress; signals, and files that commands write."""
