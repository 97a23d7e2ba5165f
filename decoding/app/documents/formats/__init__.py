"""Formats of documents: what each is, and how its bytes become text. It starts no process and opens
no file.
"""
