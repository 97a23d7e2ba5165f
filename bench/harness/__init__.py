"""What benchmarks share: texts, options, processes of their own, documents, tables, the page."""
