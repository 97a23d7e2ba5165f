"""The thread that owns the models and answers queued requests; independent of HTTP."""
