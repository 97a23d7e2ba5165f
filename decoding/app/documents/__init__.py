"""Documents in files: found in folders and archives, and read as text, other formats than text by a
child process with limits. It knows no models.
"""
