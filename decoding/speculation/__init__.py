"""Drafts and their exact verification: sampling laws, decoders that nest, prompt lookup, draft
lengths.
"""
